// What a training step does beside its matmuls on a CPU, forward and backward: attention, QK-norm
// with RoPE, GELU and cross-entropy. Each operation is one pass over memory, or one over tiles that
// stay in a core's cache. Tensors are float32 or bfloat16, all arithmetic is float32. Vectors and exp
// are those of the decode step (extension/kernels.h).
#include <vector>

#include "gelu.h"
#include "kernels.h"

// (B, heads, T, D) with a last dimension that is contiguous; strides in elements.
struct Heads {
    void* data;
    int64_t b, h, t;
    int64_t half;  // bfloat16 in place of float32

    // Copy n elements of a head vector, times a factor.
    void read(int64_t batch, int64_t head, int64_t token, int64_t n, float* to, float factor = 1) const {
        const int64_t at = batch * b + head * h + token * t;
        if (half)
            for (int64_t i = 0; i < n; i++) to[i] = from_bfloat16(((uint16_t*)data)[at + i]) * factor;
        else
            for (int64_t i = 0; i < n; i++) to[i] = ((float*)data)[at + i] * factor;
    }
    void write(int64_t batch, int64_t head, int64_t token, int64_t n, const float* from) const {
        const int64_t at = batch * b + head * h + token * t;
        if (half)
            for (int64_t i = 0; i < n; i++) ((uint16_t*)data)[at + i] = to_bfloat16(from[i]);
        else
            memcpy((float*)data + at, from, n * sizeof(float));
    }
};

constexpr int WIDEST = 1024;  // head_dim

// C (m x n) = A (m x depth) B (depth x n), or += it; n is a multiple of 16.
static void multiply(int64_t m, int64_t n, int64_t depth, const float* a, int64_t rows,
                     int64_t columns, const float* b, int64_t b_row, float* c, int64_t c_row,
                     bool add = false) {
    int64_t j = 0;
    for (; WIDE && j + 2 * LANES <= n; j += 2 * LANES)
        column<2>(m, depth, a, rows, columns, b + j, b_row, c + j, c_row, add);
    for (; j < n; j += LANES)
        column<1>(m, depth, a, rows, columns, b + j, b_row, c + j, c_row, add);
}

// -- attention ------------------------------------------------------------------------------------

// q, y, dy, dq: (B, H, T, D). k, v, dk, dv: (B, Hkv, T, D). lse: (B, H, T), the logarithm of the
// softmax's denominator. sink, dsink: (H,), or null.
struct Attention {
    Heads q, k, v, y, dy, dq, dk, dv;
    float* lse;
    const float* sink;
    float* dsink;
    float* sums;  // for dk and dv of each unit: (B * Hkv * parts, 2, T rounded up + 16, D rounded up)
    int64_t B, H, Hkv, T, D;
    int64_t parts;   // units of work for each K/V head
    int64_t threads;
    int64_t window;  // keys that a query sees; T or more = all up to its own
    uint64_t seed;   // of dropout
    float dropout;   // probability
};

// A unit of work: the query blocks part, part + parts, ... of all query heads of one K/V head. Its
// K and V are copied once, padded with zeros to widths and lengths that are multiples of 16.
struct Unit {
    const Attention& a;
    int64_t batch, kv_head, group, width, length, block;
    std::vector<float> k, v, k_t, v_t;  // (length, width), and (width, length)
    std::vector<float> q, y, p, dp;     // of a block: (group * block, width or length)

    Unit(const Attention& a, int64_t pair, bool backward)
        : a(a), batch(pair / a.Hkv), kv_head(pair % a.Hkv), group(a.H / a.Hkv),
          width(padded(a.D)), length(padded(a.T) + LANES),
          block(std::min<int64_t>(a.T, a.window < 48 ? 16 : 32)) {
        const int64_t rows = group * block, most = padded(span(block)) + LANES;
        q.resize(rows * width);
        y.resize(rows * width);
        p.resize(rows * most);
        pack(a.k, k_t, true);
        if (!backward) {
            pack(a.v, v, false);
            return;
        }
        pack(a.k, k, false);
        pack(a.v, v_t, true);
        dp.resize(rows * most);
    }

    int64_t span(int64_t n) const { return std::min(a.T, n + a.window - 1); }

    void pack(const Heads& from, std::vector<float>& to, bool transposed) {
        to.assign(length * width, 0);
        for (int64_t t = 0; t < a.T; t++) {
            float row[WIDEST];
            from.read(batch, kv_head, t, a.D, transposed ? row : &to[t * width]);
            for (int64_t d = 0; transposed && d < a.D; d++) to[d * length + t] = row[d];
        }
    }

    // Copy n rows of each query head from `first` on, times a factor; the padding stays 0.
    void take(const Heads& from, int64_t first, int64_t n, float factor, std::vector<float>& to) {
        for (int64_t g = 0; g < group; g++)
            for (int64_t i = 0; i < n; i++)
                from.read(batch, kv_head * group + g, first + i, a.D, &to[(g * n + i) * width], factor);
    }

    void give(const std::vector<float>& from, int64_t first, int64_t n, const Heads& to) {
        for (int64_t g = 0; g < group; g++)
            for (int64_t i = 0; i < n; i++)
                to.write(batch, kv_head * group + g, first + i, a.D, &from[(g * n + i) * width]);
    }
};

// The queries of a block start at token `first`, its keys at token `start`. There are `keys` of
// them, a multiple of 16, the last ones behind the last query's own.
struct Block {
    int64_t first, n, start, keys;

    Block(const Unit& u, int64_t index) : first(index * u.block) {
        n = std::min(u.block, u.a.T - first);
        start = std::max<int64_t>(0, first - u.a.window + 1);
        keys = padded(first + n - start);
    }
    // Keys low to high - 1, counted from `start`, are those that query i of the block sees.
    int64_t low(const Unit& u, int64_t i) const {
        return std::max<int64_t>(0, first + i - u.a.window + 1) - start;
    }
    int64_t high(int64_t i) const { return first + i - start + 1; }
};

INLINE uint32_t mixed(uint32_t x) {  // a hash: "lowbias32" of Ettinger's hash-prospector
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Multiply row p (keys,) of query `token` by 0 or 1 / (1 - dropout). The same in both passes.
static void drop(const Attention& a, int64_t row, int64_t start, int64_t keys, float* p) {
    const uint32_t key = mixed((uint32_t)a.seed + mixed((uint32_t)row));
    const uint32_t other = mixed((uint32_t)(a.seed >> 32) ^ key);
    const uint32_t limit = (uint32_t)(a.dropout * 4294967296.0);
    const float factor = 1 / (1 - a.dropout);
    for (int64_t j = 0; j < keys; j++)
        p[j] = mixed(mixed((uint32_t)(start + j) ^ key) + other) < limit ? 0 : p[j] * factor;
}

static void fill_outside(float* row, int64_t low, int64_t high, int64_t keys, float value) {
    std::fill(row, row + low, value);
    std::fill(row + high, row + keys, value);
}

// Scores (keys,) of one query -> weights, and the logarithm of their sum.
static float softmax(float* row, int64_t low, int64_t high, int64_t keys, const float* sink) {
    fill_outside(row, low, high, keys, -INFINITY);
    const float most = largest_of(row, keys, sink ? *sink : -INFINITY);
    const float total = exponentials(row, keys, most) + (sink ? std::exp(*sink - most) : 0);
    for (int64_t j = 0; j < keys; j += LANES) store(row + j, load(row + j) * (1 / total));
    return most + std::log(total);
}

extern "C" void nanokv_attention(const Attention* args) {
    const Attention& a = *args;
    const int64_t parts = a.parts;
    const float scale = 1 / std::sqrt((float)a.D);
    for_each(a.threads, a.B * a.Hkv * parts, 1, [&](int64_t unit) {
        Unit u(a, unit / parts, false);
        for (int64_t index = unit % parts; index * u.block < a.T; index += parts) {
            const Block block(u, index);
            const int64_t rows = u.group * block.n;
            u.take(a.q, block.first, block.n, scale, u.q);
            multiply(rows, block.keys, a.D, u.q.data(), u.width, 1, &u.k_t[block.start], u.length,
                     u.p.data(), block.keys);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t head = u.kv_head * u.group + r / block.n, i = r % block.n;
                const int64_t row = (u.batch * a.H + head) * a.T + block.first + i;
                float* p = &u.p[r * block.keys];
                a.lse[row] = softmax(p, block.low(u, i), block.high(i), block.keys,
                                     a.sink ? a.sink + head : nullptr);
                if (a.dropout > 0) drop(a, row, block.start, block.keys, p);
            }
            multiply(rows, u.width, block.keys, u.p.data(), block.keys, 1,
                     &u.v[block.start * u.width], u.width, u.y.data(), u.width);
            u.give(u.y, block.first, block.n, a.y);
        }
    });
}

// Scores of a block (in u.p) and gradients of weights (in u.dp) -> weights that V was multiplied by,
// and gradients of scores. u.y holds the gradients of the outputs.
static void score_gradients(Unit& u, const Block& block, float* dsink) {
    const Attention& a = u.a;
    for (int64_t r = 0; r < u.group * block.n; r++) {
        const int64_t head = u.kv_head * u.group + r / block.n, i = r % block.n;
        const int64_t row = (u.batch * a.H + head) * a.T + block.first + i;
        const float lse = a.lse[row];
        float *p = &u.p[r * block.keys], *dp = &u.dp[r * block.keys], mean = 0, y[WIDEST];
        a.y.read(u.batch, head, block.first + i, a.D, y);
        for (int64_t d = 0; d < a.D; d++) mean += u.y[r * u.width + d] * y[d];

        for (int64_t j = 0; j < block.keys; j += LANES)
            store(p + j, exp16(load(p + j) - lse));
        fill_outside(p, block.low(u, i), block.high(i), block.keys, 0);
        if (a.dropout > 0) drop(a, row, block.start, block.keys, dp);
        for (int64_t j = 0; j < block.keys; j += LANES)
            store(dp + j, load(p + j) * (load(dp + j) - mean));
        if (a.dropout > 0) drop(a, row, block.start, block.keys, p);
        if (dsink) dsink[head] -= std::exp(a.sink[head] - lse) * mean;
    }
}

extern "C" void nanokv_attention_backward(const Attention* args) {
    const Attention& a = *args;
    const int64_t parts = a.parts, pairs = a.B * a.Hkv, width = padded(a.D);
    const int64_t size = (padded(a.T) + LANES) * width;
    const float scale = 1 / std::sqrt((float)a.D);
    std::vector<float> sinks(a.dsink ? pairs * parts * a.H : 0);
    for_each(a.threads, pairs * parts, 1, [&](int64_t unit) {
        Unit u(a, unit / parts, true);
        std::vector<float> dq(u.q.size());
        float *dk = a.sums + unit * 2 * size, *dv = dk + size;
        std::fill(dk, dk + 2 * size, 0.0f);
        for (int64_t index = unit % parts; index * u.block < a.T; index += parts) {
            const Block block(u, index);
            const int64_t rows = u.group * block.n, keys = block.keys, at = block.start * width;
            u.take(a.q, block.first, block.n, scale, u.q);
            u.take(a.dy, block.first, block.n, 1, u.y);
            multiply(rows, keys, a.D, u.q.data(), width, 1, &u.k_t[block.start], u.length,
                     u.p.data(), keys);
            multiply(rows, keys, a.D, u.y.data(), width, 1, &u.v_t[block.start], u.length,
                     u.dp.data(), keys);
            score_gradients(u, block, a.dsink ? &sinks[unit * a.H] : nullptr);

            multiply(keys, width, rows, u.p.data(), 1, keys, u.y.data(), width, dv + at, width, true);
            multiply(keys, width, rows, u.dp.data(), 1, keys, u.q.data(), width, dk + at, width, true);
            multiply(rows, width, keys, u.dp.data(), keys, 1, &u.k[at], width, dq.data(), width);
            for (float& x : dq) x *= scale;
            u.give(dq, block.first, block.n, a.dq);
        }
    });
    for_each(a.threads, pairs * a.T, 16, [&](int64_t row) {
        const int64_t pair = row / a.T, t = row % a.T;
        for (int which = 0; which < 2; which++) {
            float totals[WIDEST] = {};
            for (int64_t part = 0; part < parts; part++) {
                const float* from = a.sums + ((pair * parts + part) * 2 + which) * size + t * width;
                for (int64_t d = 0; d < a.D; d++) totals[d] += from[d];
            }
            (which ? a.dv : a.dk).write(pair / a.Hkv, pair % a.Hkv, t, a.D, totals);
        }
    });
    for (size_t i = 0; i < sinks.size(); i++) a.dsink[i % a.H] += sinks[i];
}

// -- QK-norm and RoPE -----------------------------------------------------------------------------

// gain: (D,). cos, sin: (T, D), as `attention.rope.RotaryTable` makes them, or null.
struct Norm {
    Heads x, y, dy, dx;
    const float *gain, *cos, *sin;
    float* dgain;  // (D,)
    int64_t B, H, T, D, threads;
    float eps;
};

// turn: -1 rotates back.
INLINE void rotated(const Norm& a, int64_t token, const float* x, float turn, float* y) {
    const int64_t half = a.D / 2;
    if (!a.cos) {
        memcpy(y, x, a.D * sizeof(float));
        return;
    }
    const float *cos = a.cos + token * a.D, *sin = a.sin + token * a.D;
    #pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        y[i] = x[i] * cos[i] + x[i + half] * turn * sin[i];
        y[i + half] = x[i + half] * cos[i + half] + x[i] * turn * sin[i + half];
    }
}

INLINE float inverse_norm(const float* x, int64_t n, float eps) {
    float squares = 0;
    #pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / std::sqrt(squares / n + eps);
}

extern "C" void nanokv_norm(const Norm* args) {
    const Norm& a = *args;
    for_each(a.threads, a.B * a.T, 16, [&](int64_t i) {
        const int64_t b = i / a.T, t = i % a.T;
        for (int64_t h = 0; h < a.H; h++) {
            float x[WIDEST], y[WIDEST];
            a.x.read(b, h, t, a.D, x);
            const float r = inverse_norm(x, a.D, a.eps);
            #pragma omp simd
            for (int64_t d = 0; d < a.D; d++) x[d] = x[d] * r * a.gain[d];
            rotated(a, t, x, 1, y);
            a.y.write(b, h, t, a.D, y);
        }
    });
}

extern "C" void nanokv_norm_backward(const Norm* args) {
    const Norm& a = *args;
    // sums of each part, added up in order: results must not depend on which ends first
    std::vector<std::vector<double>> sums(a.threads, std::vector<double>(a.D));
    for_each(a.threads, a.threads, 1, [&](int64_t part) {
        double* dgain = sums[part].data();
        const int64_t tokens = a.B * a.T;
        for (int64_t i = part * tokens / a.threads; i < (part + 1) * tokens / a.threads; i++)
            for (int64_t h = 0, b = i / a.T, t = i % a.T; h < a.H; h++) {
                float x[WIDEST], dy[WIDEST], u[WIDEST], mean = 0;
                a.x.read(b, h, t, a.D, x);
                a.dy.read(b, h, t, a.D, dy);
                rotated(a, t, dy, -1, u);
                const float r = inverse_norm(x, a.D, a.eps);
                #pragma omp simd reduction(+ : mean)
                for (int64_t d = 0; d < a.D; d++) mean += u[d] * x[d] * r * a.gain[d];
                mean /= a.D;
                #pragma omp simd
                for (int64_t d = 0; d < a.D; d++) {
                    dgain[d] += u[d] * x[d] * r;
                    x[d] = (u[d] * a.gain[d] - x[d] * r * mean) * r;
                }
                a.dx.write(b, h, t, a.D, x);
            }
    });
    for (int64_t d = 0; d < a.D; d++) {
        double total = 0;
        for (const auto& sum : sums) total += sum[d];
        a.dgain[d] = (float)total;
    }
}

// -- cross-entropy --------------------------------------------------------------------------------

// Replace logits x (n,) by the gradients of the loss, which is returned.
static float cross_entropy(float* x, int64_t n, int64_t target) {
    const int64_t whole = n / LANES * LANES;
    const float hit = x[target];
    float most = largest_of(x, whole, -INFINITY), total = 0;
    for (int64_t i = whole; i < n; i++) most = std::max(most, x[i]);
    for (int64_t i = whole; i < n; i++) total += x[i] = exp1(x[i] - most);
    total += exponentials(x, whole, most);
    for (int64_t i = 0; i < n; i++) x[i] *= 1 / total;
    x[target] -= 1;
    return most + std::log(total) - hit;
}

// Replace logits (rows, n) by the gradients of the sum of the losses; losses: (rows,). Both are 0 in
// a row whose target is `ignored`. half: logits are bfloat16 in place of float32.
extern "C" void nanokv_cross_entropy(int64_t threads, void* logits, const int64_t* targets, float* losses,
                                     int64_t rows, int64_t n, int64_t ignored, int64_t half) {
    const Heads all{logits, 0, 0, n, half};
    for_each(threads, rows, 4, [=](int64_t row) {
        static thread_local std::vector<float> copy;
        float* x = (float*)logits + row * n;
        if (half) {
            copy.resize(n);
            x = copy.data();
            all.read(0, 0, row, n, x);
        }
        losses[row] = targets[row] == ignored ? 0 : cross_entropy(x, n, targets[row]);
        if (targets[row] == ignored) std::fill(x, x + n, 0.0f);
        if (half) all.write(0, 0, row, n, x);
    });
}

// total (n,) += part, which is bfloat16.
extern "C" void nanokv_add(int64_t threads, float* total, const uint16_t* part, int64_t n) {
    each16(threads, n, [=](int64_t i, int64_t k) {
        store_some(total + i, load_some(total + i, k) + load_some(part + i, k), k);
    });
}

extern "C" int64_t nanokv_train_sizes(int64_t which) {
    return which ? sizeof(Norm) : sizeof(Attention);
}
