// Attention of the new tokens of prompts over the K and V of their rows, which are converted to floats
// one tile of keys at a time (FlashAttention, Dao et al. 2022). Included by decode.cpp.
#pragma once

// Vector `at` (D,) of INT4 as bytes, `stride` apart.
INLINE void unpack(const void* base, int64_t at, int64_t D, int8_t* to, int64_t stride) {
    const uint8_t* from = (const uint8_t*)base + at * D / 2;
    for (int64_t d = 0; d < D / 2; d++) {
        to[d * stride] = (int8_t)((from[d] & 15) - 8);
        to[(d + D / 2) * stride] = (int8_t)((from[d] >> 4) - 8);
    }
}

// B rows of up to t tokens each, whose K and V are stored already.
struct Chunk {
    Slot slot;                    // keys are in order, also those of a ring
    const void* q;                // (B, H, t, D), at these strides; BFLOAT16 if half
    void* y;                      // the same
    const int64_t *before, *n;    // (B,): keys before the chunk, and its tokens
    const int32_t* table;         // (B, table_width): pages of the rows, or null
    const float* sink;            // (H,), or null
    int64_t q_b, q_h, q_t, y_b, y_h, y_t;
    int64_t B, H, t, table_width, window, threads;
    int32_t half;
};

constexpr int64_t KEYS = 128;        // of a tile
constexpr int64_t MOST_ROWS = 192;   // of a block: its queries times the heads that share K and V
constexpr int64_t P_ROW = KEYS + LANES;  // rows a power of two apart would share lines of the cache

// The room of a thread. A panel is 16 columns of a matrix.
struct ChunkRoom {
    Buffer<float> q, y, p, top, total;
    Buffer<float> k;  // (KEYS / 16, D, 16)
    Buffer<float> v;  // (D / 16, KEYS, 16)
    // On tiles scales stay out of K and V, which are exact in bfloat16 without them. Queries and weights are split.
    const bool on_tiles;
    float k_scale[KEYS] = {}, v_scale[KEYS] = {};
    Buffer<uint16_t> split_q, split_p, pairs;

    ChunkRoom(int64_t most_rows, const Slot& slot)
        : ChunkRoom(padded(most_rows, 32), slot.head_dim, slot.dtype != FLOAT32 && slot.head_dim % 32 == 0 && tiles()) {}
    ChunkRoom(int64_t rows, int64_t D, bool by_tiles)
        : q(rows * D), y(rows * padded(D)), p(rows * P_ROW), top(rows), total(rows), k(KEYS * D), v(KEYS * padded(D)),
          on_tiles(by_tiles), split_q(by_tiles ? rows * 2 * D : 0), split_p(by_tiles ? rows * 2 * KEYS : 0),
          pairs(by_tiles ? KEYS * 2 * D : 0) {}
};

// -- products on tiles, of floats with numbers that bfloat16 holds: a float is the sum of two bfloat16, the nearest
// one and the rest (to 2**-17), which lie side by side in a row

static void split(const float* x, int64_t n, uint16_t* to) {  // n: a multiple of 32
    for (int64_t i = 0; i < n; i += 32) {
        float rest[32];
        to_halves(x + i, to + i);
        for (int j = 0; j < 32; j += LANES) store(rest + j, load(x + i + j) - load(to + i + j));
        to_halves(rest, to + n + i);
    }
}

// A panel of n rows in pairs, twice: for both parts of what it is multiplied by.
static void pair_rows(const float* panel, int64_t n, uint16_t* to) {
    for (int64_t i = 0; i < n; i += 2) to_pairs(panel + i * LANES, to + i * LANES);
    memcpy(to + n * LANES, to, n * LANES * sizeof(uint16_t));
}

// f(row, column, 16 sums) of `rows` rows of `split` and `columns` columns in panels of `pair_rows`, of n elements each
template <typename F>
static void split_products(const uint16_t* a, int64_t rows, const uint16_t* b, int64_t columns, int64_t n, F f) {
    alignas(64) f16x sums[4][LANES];
    for (int64_t row = 0; row < rows; row += 32)
        for (int64_t column = 0; column < columns; column += 32) {
            tile_sums<2, 2, true>(a + row * 2 * n, b + column * 2 * n, 4 * n, nullptr, 0, sums);
            for (int i = 0; i < 4; i++)
                for (int64_t r = 0; r < LANES; r++) f(row + i % 2 * LANES + r, column + i / 2 * LANES, sums[i][r]);
        }
}

template <typename T>
INLINE const T* unpacked(const Slot& slot, const void* base, int64_t at, int64_t D, int8_t* room) {
    if (slot.dtype != INT4) return (const T*)base + at * D;
    unpack(base, at, D, room, 1);
    return (const T*)room;
}

// K and V of keys `first` to first + n - 1 of row b, as panels. Pages that a row does not have are beyond
// its tokens: zeros.
template <typename T>
static void load_keys(const Chunk& c, int64_t b, int64_t g, int64_t first, int64_t n, ChunkRoom& room) {
    const Slot& slot = c.slot;
    const int64_t D = slot.head_dim, width = padded(D);
    Buffer<int8_t> nibbles(slot.dtype == INT4 ? D : 0);
    for (int64_t s = 0, run; s < n; s += run) {
        const int64_t key = first + s, index = c.table ? key % slot.capacity : key;
        const int64_t unit = c.table ? c.table[b * c.table_width + key / slot.capacity] : b;
        run = std::min({n - s, LANES - s % LANES, slot.capacity - index});
        float* k = &room.k[s / LANES * LANES * D + s % LANES];
        const int64_t at = (unit * slot.n_kv_head + g) * slot.capacity + index;
        float k_scale[LANES], v_scale[LANES];
        for (int64_t i = 0; i < run; i++) {
            k_scale[i] = unit < 0 ? 0 : slot.scaled() ? from_half(slot.k_scale[at + i]) : 1;
            v_scale[i] = unit < 0 ? 0 : slot.scaled() ? from_half(slot.v_scale[at + i]) : 1;
        }
        if (room.on_tiles) {
            std::copy_n(k_scale, run, room.k_scale + s), std::fill_n(k_scale, run, 1.0f);
            std::copy_n(v_scale, run, room.v_scale + s), std::fill_n(v_scale, run, 1.0f);
        }
        if (unit < 0) {
            for (int64_t d = 0; d < D; d++) std::fill(k + d * LANES, k + d * LANES + run, 0.0f);
        } else if (slot.transposed) {
            const T* from = (const T*)slot.k + (at - index) * D + index;
            for (int64_t d = 0; d < D; d++, from += slot.capacity) {
                if (run == LANES) store(k + d * LANES, load(from) * load(k_scale));
                else for (int64_t i = 0; i < run; i++) k[d * LANES + i] = to_float(from[i]) * k_scale[i];
            }
        } else {
            for (int64_t i = 0; i < run; i++) {
                const T* from = unpacked<T>(slot, slot.k, at + i, D, nibbles.data());
                for (int64_t d = 0; d < D; d++) k[d * LANES + i] = to_float(from[d]) * k_scale[i];
            }
        }
        for (int64_t i = 0; i < run; i++) {
            float* v = &room.v[(s + i) * LANES];
            if (unit < 0) {
                for (int64_t d = 0; d < width; d += LANES) store(v + d * KEYS, f16x{});
                continue;
            }
            const T* from = unpacked<T>(slot, slot.v, at + i, D, nibbles.data());
            int64_t d = 0;
            for (; d + LANES <= D; d += LANES) store(v + d * KEYS, load(from + d) * v_scale[i]);
            for (int64_t j = 0; d + j < D; j++) v[d * KEYS + j] = to_float(from[d + j]) * v_scale[i];
        }
    }
}

// Scores of keys low to high - 1 (of n) -> weights, relative to the largest so far. Returns the factor
// by which what was relative to the one before shrinks.
static float running_softmax(float* p, int64_t low, int64_t high, int64_t n, float& top, float& total) {
    const int64_t end = padded(n);
    if (low >= high) {
        std::fill(p, p + end, 0.0f);
        return 1;
    }
    std::fill(p, p + low, -INFINITY);
    std::fill(p + high, p + end, -INFINITY);  // of weight 0
    const float most = largest_of(p, end, top), factor = exp1(top - most);
    total = total * factor + exponentials(p, end, most);
    top = most;
    return factor;
}

// p (rows, P_ROW) = q times m keys
static void scores(int64_t rows, int64_t D, int64_t m, ChunkRoom& room) {
    float* p = room.p.data();
    for (int64_t s = 0; s < m; s += LANES) {
        if (room.on_tiles) pair_rows(&room.k[s * D], D, &room.pairs[s * 2 * D]);
        else column<1>(rows, D, room.q.data(), D, 1, &room.k[s * D], LANES, p + s, P_ROW, false);
    }
    if (room.on_tiles)
        split_products(room.split_q.data(), rows, room.pairs.data(), m, D, [&](int64_t r, int64_t s, f16x sums) {
            store(p + r * P_ROW + s, sums * load(room.k_scale + s));
        });
}

// y (rows, width) += the weights p times the values of m keys
static void add_values(int64_t rows, int64_t D, int64_t m, ChunkRoom& room) {
    const int64_t width = padded(D);
    float *p = room.p.data(), *y = room.y.data();
    if (!room.on_tiles) {
        for (int64_t d = 0; d < width; d += LANES)
            column<1>(rows, m, p, P_ROW, 1, &room.v[d * KEYS], LANES, y + d, width, true);
        return;
    }
    const int64_t n = padded(m, 32);  // zeros behind the keys
    for (int64_t d = 0; d < D; d += LANES) {
        float* panel = &room.v[d * KEYS];
        std::fill(panel + m * LANES, panel + n * LANES, 0.0f);
        pair_rows(panel, n, &room.pairs[d * 2 * n]);
    }
    for (int64_t r = 0; r < rows; r++) {
        float* row = p + r * P_ROW;
        std::fill(row + m, row + n, 0.0f);
        for (int64_t s = 0; s < m; s += LANES) store(row + s, load(row + s) * load(room.v_scale + s));
        split(row, n, &room.split_p[r * 2 * n]);
    }
    split_products(room.split_p.data(), rows, room.pairs.data(), D, n, [&](int64_t r, int64_t d, f16x sums) {
        store(y + r * width + d, load(y + r * width + d) + sums);
    });
}

// Queries `first` to first + n - 1 of row b, times `scale`, for the heads of K/V head g.
template <typename T>
static void attend_block(const Chunk& c, int64_t b, int64_t g, int64_t first, int64_t n, float scale, ChunkRoom& room) {
    const int64_t D = c.slot.head_dim, width = padded(D), group = c.H / c.slot.n_kv_head, rows = group * n;
    float *q = room.q.data(), *y = room.y.data(), *p = room.p.data();
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = b * c.q_b + (g * group + r / n) * c.q_h + (first + r % n) * c.q_t;
        for (int64_t d = 0; d < D; d++)
            q[r * D + d] = scale * (c.half ? from_bfloat16(((const uint16_t*)c.q)[at + d]) : ((const float*)c.q)[at + d]);
    }
    WithTiles here(room.on_tiles);
    for (int64_t r = 0; room.on_tiles && r < rows; r++) split(q + r * D, D, &room.split_q[r * 2 * D]);
    std::fill(y, y + rows * width, 0.0f);
    std::fill(room.top.begin(), room.top.end(), -3e38f);
    std::fill(room.total.begin(), room.total.end(), 0.0f);

    const int64_t position = c.before[b] + first, end = position + n;
    for (int64_t m, key = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0; key < end; key += m) {
        m = std::min(KEYS, end - key);
        load_keys<T>(c, b, g, key, m, room);
        scores(rows, D, m, room);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t own = position + r % n, low = c.window ? std::max<int64_t>(0, own - c.window + 1 - key) : 0;
            const float factor = running_softmax(p + r * P_ROW, low, std::min(m, own - key + 1), m, room.top[r], room.total[r]);
            for (int64_t d = 0; factor != 1 && d < width; d += LANES) store(y + r * width + d, load(y + r * width + d) * factor);
        }
        add_values(rows, D, m, room);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = g * group + r / n, at = b * c.y_b + head * c.y_h + (first + r % n) * c.y_t;
        const float total = room.total[r] + (c.sink ? std::exp(c.sink[head] - room.top[r]) : 0);
        for (int64_t d = 0; d < D; d++) {
            const float value = y[r * width + d] / total;
            if (c.half) ((uint16_t*)c.y)[at + d] = to_bfloat16(value);
            else ((float*)c.y)[at + d] = value;
        }
    }
}

static auto attend_block_of(const Slot& slot) {
    return slot.scaled() ? attend_block<int8_t> : slot.dtype == BFLOAT16 ? attend_block<uint16_t> : attend_block<float>;
}

// Queries of a block, of t: few enough that each thread has two blocks, if there are so many.
static int64_t block_size(int64_t group, int64_t pairs, int64_t t, int64_t threads) {
    int64_t size = std::min({std::max<int64_t>(MOST_ROWS / group, 16), (int64_t)64, t});
    while (size > 8 && pairs * ((t + size - 1) / size) < 2 * threads) size /= 2;
    return size;
}
