// One step of a GPT in float32 arithmetic: one or a few tokens per row in, logits out, K and V written
// to the cache's own storage. What `model.py` computes, in the same order; `engine/native/__init__.py`
// compiles this file, fills in the structs and says what it can serve.
//
// Notation: m tokens, H query heads of D, Hkv K/V heads of D (a latent is one of its own width), a part:
// a range of the keys of a token.
#include "gelu.h"
#include "kernels.h"

#include <new>
#include <optional>
#include <vector>

typedef uint16_t half_t;  // the bits of an fp16 scale

#if defined(__F16C__)
INLINE float from_half(half_t x) { return _cvtsh_ss(x); }
INLINE half_t to_half(float x) { return _cvtss_sh(x, 0); }
#elif defined(__ARM_FP16_FORMAT_IEEE)
INLINE float from_half(half_t x) { __fp16 y; memcpy(&y, &x, 2); return y; }
INLINE half_t to_half(float x) { __fp16 y = x; half_t z; memcpy(&z, &y, 2); return z; }
#else
#error "no conversion to fp16 is known for this processor"
#endif

struct Slot {
    void *k, *v;               // (units, Hkv, capacity, D); a unit is a row, or a page of a pool;
                               // equal where K = V
    half_t *k_scale, *v_scale; // INT8, INT4: (units, Hkv, capacity)
    void* last_key;            // (rows, Hkv, D / 2): the slower half of each row's last key, which
                               // the next one gets (`attention.rope.offset_keys`), or null
    int64_t n_kv_head, head_dim;
    int64_t capacity;          // positions of a unit
    int32_t dtype, ring, paged;
    int32_t transposed;        // K lies in memory as (units, Hkv, D, capacity)

    bool scaled() const { return dtype == INT8 || dtype == INT4; }
};

struct Layer {
    const float *ln_1, *ln_1_bias, *ln_2, *ln_2_bias, *q_norm, *k_norm;
    const float *cos, *sin;    // (positions, D), or null
    const float *k_up, *v_up;  // (H, D, latent), or null
    const float *sink;         // (H,), or null
    Linear c_attn, attn_proj, c_fc, mlp_proj;
    int32_t slot, owns;
};

struct Model {
    const Layer* layers;
    const Slot* slots;
    const void *wte, *wpe;     // (vocabulary, C), or null where it is lm_head's INT8 weight;
                               // (positions, C) or null
    const float *ln_f, *ln_f_bias;
    Linear lm_head;
    int64_t n_layer, n_slot, n_embd, n_head, head_dim;
    int32_t wte_dtype, wpe_dtype, activation, round_kv;  // round_kv: as an int8 cache would
    float act_clamp;                                     // 0 = none
};

struct Step {
    const int64_t *tokens, *positions;  // (m,); those of a row are neighbours, in order
    const int64_t *rows;                // (m,): cache rows
    const int64_t *later;               // (m,): number of tokens of the same row after this one
    const int64_t *wanted;              // (n_wanted,): tokens after which logits are wanted
    const int32_t* table;               // (m, table_width): pages of the rows, or null
    int64_t m, n_wanted, table_width, threads;
    float* logits;                      // (n_wanted, V)
};

// -- K and V --------------------------------------------------------------------------------------

constexpr int64_t TILE = 64;         // keys whose scores are computed together
constexpr int64_t LONG_TILE = 1024;  // of one query

struct Place { int64_t unit, index; };

INLINE Place place_of(const Slot& slot, const Step& step, int64_t i, int64_t key) {
    if (!slot.paged) return {step.rows[i], key};
    return {step.table[i * step.table_width + key / slot.capacity], key % slot.capacity};
}

INLINE int64_t index_of(const Slot& slot, int64_t position) {
    return slot.ring ? position % slot.capacity : position;
}

INLINE float int_scale(const float* x, int64_t n, int most = 127) {  // as `kv.quantize.quantize_int8`
    float scale = largest(x, n) / most;
    if (scale < 5.9604645e-8f) scale = 5.9604645e-8f;
    if (scale > 65504) scale = 65504;
    return from_half(to_half(scale));
}

INLINE int8_t to_int(float x, float scale, int most = 127) {
    float value = std::nearbyint(x / scale);
    return (int8_t)(value < -most ? -most : value > most ? most : value);
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t x) { return from_bfloat16(x); }
INLINE float to_float(int8_t x) { return x; }

// One head's K or V of a token, stored from element `to` on, `stride` apart.
static void write_vector(void* base, half_t* scales, int64_t scale_at, int32_t dtype, int64_t to,
                         int64_t stride, const float* x, int64_t n) {
    if (dtype == INT8) {
        float scale = int_scale(x, n);
        scales[scale_at] = to_half(scale);
        for (int64_t d = 0; d < n; d++) ((int8_t*)base)[to + d * stride] = to_int(x[d], scale);
    } else if (dtype == INT4) {  // see `kv.quantize.quantize_int4`
        float scale = int_scale(x, n, 7);
        scales[scale_at] = to_half(scale);
        for (int64_t d = 0; d < n / 2; d++)
            ((uint8_t*)base)[to / 2 + d] = (to_int(x[d], scale, 7) + 8) | (to_int(x[d + n / 2], scale, 7) + 8) << 4;
    } else if (dtype == BFLOAT16) {
        for (int64_t d = 0; d < n; d++) ((uint16_t*)base)[to + d * stride] = to_bfloat16(x[d]);
    } else {
        for (int64_t d = 0; d < n; d++) ((float*)base)[to + d * stride] = x[d];
    }
}

static void round_to_int8(float* x, int64_t n) {
    float scale = int_scale(x, n);
    for (int64_t d = 0; d < n; d++) x[d] = to_int(x[d], scale) * scale;
}

static void append(const Model& model, const Slot& slot, Place place, float* k, float* v) {
    const int64_t D = slot.head_dim;
    auto [unit, index] = place;
    const bool tied = slot.k == slot.v;
    for (int64_t g = 0; g < slot.n_kv_head; g++, k += D, v += D) {
        if (model.round_kv) round_to_int8(k, D);
        if (model.round_kv && !tied) round_to_int8(v, D);
        int64_t head = (unit * slot.n_kv_head + g) * slot.capacity;
        int64_t at = (head + index) * D, at_k = slot.transposed ? head * D + index : at;
        write_vector(slot.k, slot.k_scale, head + index, slot.dtype, at_k,
                     slot.transposed ? slot.capacity : 1, k, D);
        if (!tied) write_vector(slot.v, slot.v_scale, head + index, slot.dtype, at, 1, v, D);
    }
}

// Give each key of K/V head g the slower half of the key before it, in which pairs are rotated slowly:
// the second quarter of its elements, and the fourth.
static void offset_keys(const Slot& slot, const Step& step, int64_t g, float* k, int64_t stride) {
    const int64_t D = slot.head_dim, quarter = D / 4;
    const bool half = slot.dtype == BFLOAT16;  // else the state is in float32
    std::vector<float> newest(D / 2);
    auto element = [&](int64_t i, int64_t d) -> float& {
        return k[i * stride + g * D + quarter + d + d / quarter * quarter];
    };
    for (int64_t i = step.m - 1; i >= 0; i--) {
        const bool first = i == 0 || !step.later[i - 1];
        const int64_t at = (step.rows[i] * slot.n_kv_head + g) * (D / 2);
        for (int64_t d = 0; d < D / 2; d++) {
            if (!step.later[i]) newest[d] = element(i, d);
            element(i, d) = !first ? element(i - 1, d)
                          : half ? from_bfloat16(((uint16_t*)slot.last_key)[at + d]) : ((float*)slot.last_key)[at + d];
            if (first && half) ((uint16_t*)slot.last_key)[at + d] = to_bfloat16(newest[d]);
            else if (first) ((float*)slot.last_key)[at + d] = newest[d];
        }
    }
}

// From a multiple of 64 bytes on: a vector load that crosses a cache line takes twice as long.
template <typename T>
struct AlignedAllocator {
    typedef T value_type;
    AlignedAllocator() = default;
    template <typename U>
    AlignedAllocator(const AlignedAllocator<U>&) {}
    T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const AlignedAllocator&) const { return true; }
    bool operator!=(const AlignedAllocator&) const { return false; }
};

template <typename T>
using Buffer = std::vector<T, AlignedAllocator<T>>;

// -- several tokens of a row ----------------------------------------------------------------------

// Tokens i to i + n - 1 of a row, which attend together: see chunks.h. row: as a page of its own.
struct Run { int64_t i, n; int32_t row; };

constexpr int64_t FEWEST_AT_ONCE = 8;  // where keys are not overwritten, fewer attend one by one

INLINE bool together(const Slot& slot, int64_t n) { return n >= (slot.ring ? 2 : FEWEST_AT_ONCE); }

// Copy K and V of a token, with D elements in a vector.
template <typename T>
static void copy_entry(const Slot& from, Place source, const Slot& to, Place place, int64_t D) {
    auto vector = [&](void* base, const Slot& slot, int64_t head, int64_t index, bool transposed) {
        return (T*)base + (transposed ? head * D + index : (head + index) * D);
    };
    for (int64_t g = 0; g < from.n_kv_head; g++) {
        const int64_t a = (source.unit * from.n_kv_head + g) * from.capacity, b = (place.unit * to.n_kv_head + g) * to.capacity;
        const T* k = vector(from.k, from, a, source.index, from.transposed);
        T* k_to = vector(to.k, to, b, place.index, to.transposed);
        for (int64_t d = 0; d < D; d++) k_to[to.transposed ? d * to.capacity : d] = k[from.transposed ? d * from.capacity : d];
        if (from.k != from.v) memcpy(vector(to.v, to, b, place.index, false), vector(from.v, from, a, source.index, false), D * sizeof(T));
        if (!from.scaled()) continue;
        to.k_scale[b + place.index] = from.k_scale[a + source.index];
        to.v_scale[b + place.index] = from.v_scale[a + source.index];
    }
}

// What a run sees of a ring, in order: the keys before it that its first token sees, then its own.
struct Ordered {
    Buffer<char> k, v;
    Buffer<half_t> k_scale, v_scale;
    Slot slot;
    int64_t before;

    void begin(const Slot& ring, const Run& run, int64_t position) {
        before = std::min(position, ring.capacity - 1);
        const int64_t n = (before + run.n) * ring.n_kv_head, D = ring.head_dim;
        const int64_t bytes = ring.dtype == INT4 ? n * D / 2 : n * D * (ring.dtype == INT8 ? 1 : ring.dtype == BFLOAT16 ? 2 : 4);
        k.resize(bytes), v.resize(bytes), k_scale.resize(n), v_scale.resize(n);
        const bool tied = ring.k == ring.v;
        slot = {k.data(), (tied ? k : v).data(), k_scale.data(), (tied ? k_scale : v_scale).data(), nullptr, ring.n_kv_head, D,
                before + run.n, ring.dtype, 0, 0, 0};
        auto copy = copier(ring);
        for (int64_t s = 0; s < before; s++)
            copy(ring, {run.row, index_of(ring, position - before + s)}, slot, {0, s}, elements(ring));
    }

    // Its newest keys -> the ring
    void end(const Slot& ring, const Run& run, int64_t position) const {
        auto copy = copier(ring);
        for (int64_t j = std::max<int64_t>(0, run.n - ring.capacity); j < run.n; j++)
            copy(slot, {0, before + j}, ring, {run.row, index_of(ring, position + j)}, elements(ring));
    }

    static int64_t elements(const Slot& ring) { return ring.dtype == INT4 ? ring.head_dim / 2 : ring.head_dim; }

    static auto copier(const Slot& ring) -> decltype(&copy_entry<float>) {
        return ring.scaled() ? copy_entry<int8_t> : ring.dtype == BFLOAT16 ? copy_entry<uint16_t> : copy_entry<float>;
    }
};

// -- attention ------------------------------------------------------------------------------------

// Vector `at` (D,) of INT4 as bytes, `stride` apart.
INLINE void unpack(const void* base, int64_t at, int64_t D, int8_t* to, int64_t stride) {
    const uint8_t* from = (const uint8_t*)base + at * D / 2;
    for (int64_t d = 0; d < D / 2; d++) {
        to[d * stride] = (int8_t)((from[d] & 15) - 8);
        to[(d + D / 2) * stride] = (int8_t)((from[d] >> 4) - 8);
    }
}

#include "chunks.h"

// Keys `start` to `end` - 1 of token i, by their index in its row's storage.
struct Part { int64_t i, start, end; };

// Queries `first` to first + n - 1 of a run.
struct Block { int64_t run, first, n; };

// How the tokens of a step attend to a slot: in blocks those of runs that attend together. The parts of
// another token i are first[i] .. first[i + 1] - 1, of at most `size` keys each.
struct Work {
    std::vector<Part> parts;
    std::vector<int64_t> first;
    std::vector<Block> blocks;
    std::vector<Ordered> ordered;  // of each run, if the slot is a ring
    int64_t size, most = 0;        // most: queries of a block

    Work(const Model& model, const Slot& slot, const Step& step, const std::vector<Run>& runs)
        : ordered(slot.ring ? runs.size() : 0) {
        int64_t total = 0, wanted = std::max<int64_t>(1, 4 * step.threads / slot.n_kv_head);
        std::vector<int64_t> n_keys(step.m);
        for (int64_t i = 0; i < step.m; i++) {
            n_keys[i] = step.positions[i] + 1;
            if (slot.ring) n_keys[i] = std::min(n_keys[i], slot.capacity);
        }
        for (size_t r = 0; r < runs.size(); r++) {
            const Run& run = runs[r];
            if (!together(slot, run.n)) continue;
            std::fill_n(n_keys.begin() + run.i, run.n, 0);
            const int64_t n = block_size(model.n_head / slot.n_kv_head, slot.n_kv_head, run.n, step.threads);
            for (int64_t a = (run.n - 1) / n * n; a >= 0; a -= n)  // the last first: they see the most keys
                blocks.push_back({(int64_t)r, a, std::min(n, run.n - a)});
            most = std::max(most, n);
        }
        for (int64_t n : n_keys) total += n;
        size = ((total + wanted - 1) / wanted + TILE - 1) / TILE * TILE;
        for (int64_t i = 0; i < step.m; i++) {
            first.push_back(parts.size());
            for (int64_t s = 0; s < n_keys[i]; s += size) parts.push_back({i, s, std::min(s + size, n_keys[i])});
        }
        first.push_back(parts.size());
    }
};

// Keys as stored: K transposed, (D, stride), or like V, (n, D).
template <typename T>
struct Tile {
    const T *k, *v;
    bool transposed;
    int64_t stride, n;
    const half_t *k_scale, *v_scale;  // INT8, INT4: (n,)
};

// Where n keys from `place` on lie.
template <typename T>
static Tile<T> stored_tile(const Slot& slot, Place place, int64_t head, int64_t n, int64_t D) {
    const int64_t start = head * slot.capacity, first = start + place.index;
    const T* k = (const T*)slot.k + (slot.transposed ? start * D + place.index : first * D);
    return {k, (const T*)slot.v + first * D, slot.transposed != 0, slot.capacity, n, slot.scaled() ? slot.k_scale + first : nullptr,
            slot.scaled() ? slot.v_scale + first : nullptr};
}

// The same with room for TILE keys. K that ends before, or is not stored transposed, is copied to
// `copy` (D, TILE), zeros behind; INT4 is unpacked there (what lies behind is masked), and V after it.
template <typename T>
static Tile<T> read_tile(const Slot& slot, Place place, int64_t head, int64_t n, int64_t D, T* copy) {
    Tile<T> tile = stored_tile<T>(slot, place, head, n, D);
    if (slot.transposed && place.index + TILE <= slot.capacity) return tile;  // the rest is masked
    if constexpr (sizeof(T) == 1)
        if (slot.dtype == INT4) {
            const int64_t first = head * slot.capacity + place.index;
            int8_t* values = copy + TILE * D;
            for (int64_t s = 0; s < n; s++) {
                unpack(slot.k, first + s, D, copy + s, TILE);
                unpack(slot.v, first + s, D, values + s * D, 1);
            }
            return {copy, values, true, TILE, n, tile.k_scale, tile.v_scale};
        }
    for (int64_t d = 0; d < D; d++) {
        if (slot.transposed) memcpy(copy + d * TILE, tile.k + d * slot.capacity, n * sizeof(T));
        else for (int64_t s = 0; s < n; s++) copy[d * TILE + s] = tile.k[s * D + d];
        memset(copy + d * TILE + n, 0, (TILE - n) * sizeof(T));
    }
    tile.k = copy, tile.stride = TILE, tile.transposed = true;
    return tile;
}

// Start to fetch a tile: in a row's storage K's lines lie far apart, which the processor does not
// foresee.
template <typename T>
static void prefetch_tile(const Slot& slot, Place place, int64_t head, int64_t D) {
    if (slot.dtype == INT4) return;
    const int64_t start = head * slot.capacity, n = std::min(TILE, slot.capacity - place.index);
    const char* v = (const char*)((const T*)slot.v + (start + place.index) * D);
    for (int64_t byte = 0; byte < n * D * (int64_t)sizeof(T); byte += 64)
        __builtin_prefetch(v + byte, 0, 2);
    if (!slot.transposed) return;
    const T* k = (const T*)slot.k + start * D + place.index;
    for (int64_t d = 0; d < D; d++, k += slot.capacity)
        for (int64_t byte = 63; byte < n * (int64_t)sizeof(T) + 63; byte += 64)
            __builtin_prefetch((const char*)k + byte, 0, 2);
}

// Vectors of sums for each of n queries: as many as there are registers for
constexpr int columns_at_once(int n) { return WIDE ? 4 : n > 2 ? 1 : 4 / n; }

// scores (N, TILE) of N queries, q (D, N): each key is loaded once for all of them
template <int N, typename T>
static void tile_scores(const float* q, const Tile<T>& tile, int64_t D, float* scores) {
    constexpr int J = columns_at_once(N);
    for (int64_t first = 0; first < TILE; first += J * LANES) {
        f16x acc[N][J] = {};
        const T* k = tile.k + first;
        for (int64_t d = 0; d < D; d++, k += tile.stride) {
            f16x keys[J];
            for (int j = 0; j < J; j++) keys[j] = load(k + j * LANES);
            for (int h = 0; h < N; h++)
                for (int j = 0; j < J; j++) acc[h][j] += keys[j] * q[d * N + h];
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < J; j++) store(scores + h * TILE + first + j * LANES, acc[h][j]);
    }
}

// scores (n,) of one query: K is read from its beginning to its end, the order that memory is fastest
// in. Where a group of queries shares K, `tile_scores` does more with a key once it is there.
template <typename T>
static void long_scores(const float* q, const Tile<T>& tile, int64_t D, float* scores) {
    constexpr int ROWS = 8;
    if (!tile.transposed) {
        for (int64_t s = 0; s < tile.n; s++) {
            const T* k = tile.k + s * D;
            f16x acc{};
            int64_t d = 0;
            for (; d + LANES <= D; d += LANES) acc += load(k + d) * load(q + d);
            if (d < D) acc += load_half(k + d) * load_half(q + d);
            scores[s] = sum(acc);
        }
        return;
    }
    memset(scores, 0, sizeof(float) * tile.n);
    for (int64_t d = 0; d < D; d += ROWS) {
        const T* k = tile.k + d * tile.stride;
        int64_t s = 0;
        for (; s + LANES <= tile.n; s += LANES) {
            f16x acc = load(scores + s);
            for (int j = 0; j < ROWS; j++) acc += load(k + j * tile.stride + s) * q[d + j];
            store(scores + s, acc);
        }
        for (; s < tile.n; s++)
            for (int j = 0; j < ROWS; j++) scores[s] += to_float(k[j * tile.stride + s]) * q[d + j];
    }
}

// out (N, width) += weights (N, SIZE) @ v (n, D), of J * 16 columns from d on (the last may be 8)
template <int N, int J, int64_t SIZE, typename T>
static void add_values(const float* weights, const T* v, int64_t n, int64_t D, int64_t d, int64_t width,
                       float* out) {
    const bool whole = d + J * LANES <= D;
    f16x acc[N][J];
    for (int h = 0; h < N; h++)
        for (int j = 0; j < J; j++) acc[h][j] = load(out + h * width + d + j * LANES);
    for (int64_t s = 0; s < n; s++) {
        f16x values[J];
        for (int j = 0; j < J; j++) {
            const T* from = v + s * D + d + j * LANES;
            values[j] = whole ? load(from) : load_half(from);
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < J; j++) acc[h][j] += values[j] * weights[h * SIZE + s];
    }
    for (int h = 0; h < N; h++)
        for (int j = 0; j < J; j++) store(out + h * width + d + j * LANES, acc[h][j]);
}

// N query heads over one tile of up to SIZE keys: the running softmax of FlashAttention. q (D, N);
// top, total (N,); out (N, padded(D))
template <int N, int64_t SIZE, typename T>
static void attend_tile(const float* q, const Tile<T>& tile, int64_t D, float* top, float* total,
                        float* out) {
    alignas(64) float scores[N * SIZE], k_scale[SIZE], v_scale[SIZE];
    if constexpr (SIZE == TILE) tile_scores<N>(q, tile, D, scores);
    else long_scores(q, tile, D, scores);
    const bool scaled = tile.k_scale;
    const int64_t width = padded(D), end = padded(tile.n);
    for (int64_t s = 0; scaled && s < tile.n; s++) {
        k_scale[s] = from_half(tile.k_scale[s]);
        v_scale[s] = from_half(tile.v_scale[s]);
    }
    for (int h = 0; h < N; h++) {
        float *row = scores + h * SIZE, most = top[h];
        for (int64_t s = 0; scaled && s < tile.n; s++) row[s] *= k_scale[s];
        for (int64_t s = tile.n; s < end; s++) row[s] = -INFINITY;  // of weight 1e-38
        #pragma omp simd reduction(max : most)
        for (int64_t s = 0; s < end; s++) most = row[s] > most ? row[s] : most;
        f16x sums{};
        for (int64_t s = 0; s < end; s += LANES) {
            f16x weights = exp16(load(row + s) - most);
            sums += weights;
            store(row + s, scaled ? weights * load(v_scale + s) : weights);
        }
        total[h] += sum(sums);
        if (most == top[h]) continue;
        float before = std::exp(top[h] - most);  // what has been added so far was relative to it
        total[h] = (total[h] - sum(sums)) * before + sum(sums);
        for (int64_t d = 0; d < D; d++) out[h * width + d] *= before;
        top[h] = most;
    }
    int64_t d = 0;
    constexpr int J = columns_at_once(N);
    for (; d + J * LANES <= D; d += J * LANES)
        add_values<N, J, SIZE>(scores, tile.v, tile.n, D, d, width, out);
    for (; d < D; d += LANES) add_values<N, 1, SIZE>(scores, tile.v, tile.n, D, d, width, out);
}

// A part's result: top, total and the sums of weighted values (D,) of each query head of K/V head g.
template <typename T>
static void attend_part(const Model& model, const Slot& slot, const Step& step, const Part& part,
                        int64_t g, const float* q, float* result, char* scratch) {
    const int64_t D = slot.head_dim, group = model.n_head / slot.n_kv_head, width = padded(D);
    float *top = result, *total = top + group, *out = total + group, *turned = (float*)scratch;
    T* copy = (T*)(turned + group * D);
    const bool in_rows = group == 1 && slot.dtype != INT4 && (!slot.transposed || slot.capacity > TILE);
    const int64_t most = in_rows ? LONG_TILE : TILE;
    std::fill(top, total, -3e38f);
    std::fill(total, out + group * width, 0.0f);
    const int sizes[] = {6, 4, 2, 1};  // of the blocks that the heads are taken in
    auto block_of = [&](int64_t h) { return *std::find_if(sizes, sizes + 4, [&](int n) { return h + n <= group; }); };
    for (int64_t h = 0, n; h < group; h += n) {
        n = block_of(h);
        for (int64_t j = 0; j < n; j++)
            for (int64_t d = 0; d < D; d++) turned[h * D + d * n + j] = q[(h + j) * D + d];
    }
    for (int64_t key = part.start, n; key < part.end; key += n) {
        Place place = place_of(slot, step, part.i, key);
        int64_t head = place.unit * slot.n_kv_head + g;
        n = std::min({most, part.end - key, slot.capacity - place.index});
        if (in_rows) {
            Tile<T> tile = stored_tile<T>(slot, place, head, n, D);
            attend_tile<1, LONG_TILE>(turned, tile, D, top, total, out);
            continue;
        }
        if (key + n < part.end) {
            Place next = place_of(slot, step, part.i, key + n);
            prefetch_tile<T>(slot, next, next.unit * slot.n_kv_head + g, D);
        }
        Tile<T> tile = read_tile<T>(slot, place, head, n, D, copy);
        for (int64_t h = 0, block; h < group; h += block) {
            block = block_of(h);
            auto attend = block == 6 ? attend_tile<6, TILE, T> : block == 4 ? attend_tile<4, TILE, T>
                        : block == 2 ? attend_tile<2, TILE, T> : attend_tile<1, TILE, T>;
            attend(turned + h * D, tile, D, top + h, total + h, out + h * width);
        }
    }
}

// y (H * D,) of a row from the results of its parts: (parts, Hkv, group * (padded(D) + 2))
static void join_parts(const Model& model, const Slot& slot, const float* sink, const float* results,
                       int64_t n_parts, float* y) {
    const int64_t D = slot.head_dim, group = model.n_head / slot.n_kv_head;
    const int64_t width = padded(D), size = group * (width + 2), stride = size * slot.n_kv_head;
    for (int64_t head = 0; head < model.n_head; head++) {
        const float* first = results + head / group * size + head % group;
        float most = -3e38f, total = 0, *out = y + head * D;
        for (int64_t p = 0; p < n_parts; p++) most = std::max(most, first[p * stride]);
        std::fill(out, out + D, 0.0f);
        for (int64_t p = 0; p < n_parts; p++) {
            const float* part = first + p * stride;
            const float* values = results + p * stride + head / group * size + 2 * group + head % group * width;
            float weight = std::exp(part[0] - most);
            total += part[group] * weight;
            for (int64_t d = 0; d < D; d++) out[d] += values[d] * weight;
        }
        if (sink) total += std::exp(sink[head] - most);
        for (int64_t d = 0; d < D; d++) out[d] /= total;
    }
}

// -- the step -------------------------------------------------------------------------------------

static void add_row(const void* table, int32_t dtype, int64_t row, int64_t n, float* x) {
    for (int64_t i = 0; i < n; i++)
        x[i] += dtype == FLOAT32 ? ((const float*)table)[row * n + i]
                                 : from_bfloat16(((const uint16_t*)table)[row * n + i]);
}

// The same from an INT8 weight: see `int8_tile`
static void add_int8_row(const Linear& l, int64_t row, float* x) {
    const uint8_t* block = (const uint8_t*)l.weight + row / LANES * LANES * l.k;
    for (int64_t i = 0; i < l.k; i++)
        x[i] += (block[i / 4 * 64 + row % LANES * 4 + i % 4] - 128) * ((const float*)l.scale)[row];
}

struct Workspace {
    Buffer<float> x, h, y, qkv, mlp, results, scale, to_latents, of_latents;
    Buffer<activation_t> values;
    Buffer<int32_t> sum;
    std::vector<Run> runs;
    std::vector<int64_t> run_of;  // each token: its run, or -1
    std::vector<int64_t> positions, rows, none;  // of the tokens of `trimmed`
    std::vector<int32_t> table;
};

// Multi-head latent attention scores latents c (S,) themselves: (q k_up) c = q (k_up c). Queries
// (m, H, D), `stride` apart -> (m, H, S).
static void queries_of_latents(const Model& model, const float* k_up, const float* q, int64_t stride, int64_t S,
                               int64_t m, float* y) {
    const int64_t D = model.head_dim, H = model.n_head;
    share(H, 1, [=](int64_t head) {
        for (int64_t i = 0; i < m; i++) {
            float* to = y + (i * H + head) * S;
            std::fill(to, to + S, 0.0f);
            for (int64_t d = 0; d < D; d++) {
                const float *row = k_up + (head * D + d) * S, factor = q[i * stride + head * D + d];
                for (int64_t c = 0; c < S; c++) to[c] += row[c] * factor;
            }
        }
    });
}

// Weighted sums of latents (m, H, S) -> of values (m, H, D).
static void values_of_latents(const Model& model, const float* v_up, const float* sums, int64_t S, int64_t m,
                              float* y) {
    const int64_t D = model.head_dim, H = model.n_head;
    share(H, 1, [=](int64_t head) {
        for (int64_t i = 0; i < m; i++) {
            const float* from = sums + (i * H + head) * S;
            for (int64_t d = 0; d < D; d++) {
                const float* row = v_up + (head * D + d) * S;
                float total = 0;
                #pragma omp simd reduction(+ : total)
                for (int64_t c = 0; c < S; c++) total += row[c] * from[c];
                y[(i * H + head) * D + d] = total;
            }
        }
    });
}

// The queries of a block, `stride` apart, -> y.
static void attend_run(const Model& model, const Layer& layer, const Step& step, const Work& work, const Run& run,
                       const Block& block, int64_t g, const float* q, int64_t stride, float* y, int64_t y_stride, ChunkRoom& room) {
    const Slot& slot = model.slots[layer.slot];
    const Ordered* ordered = slot.ring ? &work.ordered[block.run] : nullptr;
    const int32_t* table = ordered ? nullptr : slot.paged ? step.table + run.i * step.table_width : &run.row;
    const int64_t S = slot.head_dim, window = slot.ring ? slot.capacity : 0;
    const Chunk chunk{ordered ? ordered->slot : slot, q + run.i * stride, y + run.i * y_stride,
                      ordered ? &ordered->before : &step.positions[run.i], &run.n, table, layer.sink, 0, S, stride, 0, S, y_stride,
                      1, model.n_head, run.n, slot.paged ? step.table_width : 1, window, step.threads, 0};
    auto attend = slot.scaled() ? attend_block<int8_t> : slot.dtype == BFLOAT16 ? attend_block<uint16_t> : attend_block<float>;
    attend(chunk, 0, g, block.first, block.n, 1, room);
}

// K and V of an owner -> its slot, and for runs in a ring to where they are read.
static void store_keys(const Model& model, const Slot& slot, const Step& step, int64_t width, Work& work, Workspace& w) {
    const int64_t S = slot.head_dim, HD = model.n_head * model.head_dim, n_ordered = work.ordered.size();
    share(n_ordered, 1, [&](int64_t r) { work.ordered[r].begin(slot, w.runs[r], step.positions[w.runs[r].i]); });
    share(step.m, [&](int64_t i) {
        float* k = &w.qkv[i * width] + HD;
        const int64_t r = n_ordered ? w.run_of[i] : -1;
        if (r < 0) append(model, slot, place_of(slot, step, i, index_of(slot, step.positions[i])), k, k + slot.n_kv_head * S);
        else append(model, work.ordered[r].slot, {0, work.ordered[r].before + i - w.runs[r].i}, k, k + slot.n_kv_head * S);
    });
    share(n_ordered, 1, [&](int64_t r) { work.ordered[r].end(slot, w.runs[r], step.positions[w.runs[r].i]); });
}

// The queries of all tokens, in place, and an owner's K and V, which are stored.
static void queries_and_keys(const Model& model, const Layer& layer, const Step& step, Work& work, Workspace& w) {
    const Slot& slot = model.slots[layer.slot];
    const int64_t D = model.head_dim, S = slot.head_dim, HD = model.n_head * D, Hkv = slot.n_kv_head, width = layer.c_attn.n;
    Buffer<float> turned(std::max(S, D));  // of each thread
    share(step.m, [&](int64_t i) {
        float *q = &w.qkv[i * width], *k = q + HD;
        const float* cos = layer.cos ? layer.cos + step.positions[i] * D : nullptr;
        const float* sin = layer.sin ? layer.sin + step.positions[i] * D : nullptr;
        for (int64_t head = 0; head < model.n_head; head++) {
            norm_and_rotate(q + head * D, layer.q_norm, cos, sin, D, turned.data());
            for (int64_t d = 0; d < D; d++) q[head * D + d] /= std::sqrt((float)D);
        }
        for (int64_t g = 0; layer.owns && g < Hkv; g++)
            norm_and_rotate(k + g * S, layer.k_norm, cos, sin, S, turned.data());
    });
    if (layer.owns && slot.last_key)
        share(Hkv, [&](int64_t g) { offset_keys(slot, step, g, &w.qkv[HD], width); });
    if (layer.owns) store_keys(model, slot, step, width, work, w);
}

static void attention(const Model& model, const Layer& layer, const Step& step, const Work& work, Workspace& w) {
    const Slot& slot = model.slots[layer.slot];
    const int64_t D = model.head_dim, S = slot.head_dim, HD = model.n_head * D, Hkv = slot.n_kv_head;
    const int64_t width = layer.c_attn.n, group = model.n_head / Hkv, size = group * (padded(S) + 2);
    Buffer<char> scratch((group + TILE) * std::max(S, D) * sizeof(float));  // of each thread
    std::optional<ChunkRoom> room;
    if (work.most) room.emplace(group * work.most, S);
    float* turned = (float*)scratch.data();
    const float* queries = w.qkv.data();
    int64_t stride = width;
    if (layer.k_up) {
        queries_of_latents(model, layer.k_up, queries, stride, S, step.m, w.to_latents.data());
        queries = w.to_latents.data(), stride = model.n_head * S;
    }
    float* y = layer.v_up ? w.of_latents.data() : w.y.data();
    const int64_t y_stride = layer.v_up ? stride : HD, n_blocks = work.blocks.size() * Hkv;
    share(n_blocks + work.parts.size() * Hkv, 1, [&](int64_t item) {
        if (item < n_blocks) {
            const Block& block = work.blocks[item / Hkv];
            return attend_run(model, layer, step, work, w.runs[block.run], block, item % Hkv, queries, stride, y, y_stride, *room);
        }
        item -= n_blocks;
        const Part& part = work.parts[item / Hkv];
        auto attend = slot.scaled() ? attend_part<int8_t>
                    : slot.dtype == BFLOAT16 ? attend_part<uint16_t> : attend_part<float>;
        attend(model, slot, step, part, item % Hkv, queries + part.i * stride + item % Hkv * group * S, &w.results[item * size],
               scratch.data());
    });
    share(step.m, [&](int64_t i) {
        float* row = y + i * y_stride;
        const int64_t first = work.first[i], n_parts = work.first[i + 1] - first;
        if (n_parts) join_parts(model, slot, layer.sink, &w.results[first * Hkv * size], n_parts, row);
        if (slot.k != slot.v || !layer.cos) return;
        for (int64_t head = 0; head < model.n_head; head++)  // V is rotated: rotate back
            norm_and_rotate(row + head * D, nullptr, layer.cos + step.positions[i] * D,
                            layer.sin + step.positions[i] * D, D, turned, -1);
    });
    if (layer.v_up) values_of_latents(model, layer.v_up, w.of_latents.data(), S, step.m, w.y.data());
}

// Only tokens whose logits are wanted are needed once all K and V are stored; each is the last of its row.
static Step trimmed(const Step& step, Workspace& w) {
    const int64_t n = step.n_wanted, pages = step.table_width;
    w.positions.resize(n), w.rows.resize(n), w.none.assign(n, 0), w.table.resize(n * pages);
    for (int64_t r = 0; r < n; r++) {
        const int64_t i = step.wanted[r];
        w.positions[r] = step.positions[i], w.rows[r] = step.rows[i];
        if (pages) std::copy_n(step.table + i * pages, pages, &w.table[r * pages]);
    }
    return {step.tokens, w.positions.data(), w.rows.data(), w.none.data(), step.wanted, w.table.data(), n, n, pages, step.threads,
            step.logits};
}

static void keep_rows(const Step& step, int64_t n, float* x) {
    for (int64_t r = 0; r < step.n_wanted; r++)
        if (step.wanted[r] != r) std::copy_n(x + step.wanted[r] * n, n, x + r * n);
}

static void norm_rows(const float* x, const float* gain, const float* bias, int64_t m, int64_t n,
                      float* y) {
    share(m, [=](int64_t i) { layer_norm(x + i * n, gain, bias, n, y + i * n); });
}

extern "C" void nanokv_decode(const Model* model_, const Step* step_) {
    const Model& model = *model_;
    const Step& step = *step_;
    const int64_t m = step.m, C = model.n_embd, HD = model.n_head * model.head_dim;
    static thread_local Workspace w;
    const Step last = trimmed(step, w);
    int64_t last_owner = 0;
    std::vector<Work> work, last_work;
    int64_t results = 0, latents = 0, qkv = 0, widest = std::max(C, HD);
    w.runs.clear();
    w.run_of.assign(m, -1);
    for (int64_t i = 0; i < m; i += step.later[i] + 1)
        if (const int64_t n = step.later[i] + 1; n > 1) {
            std::fill_n(w.run_of.begin() + i, n, w.runs.size());
            w.runs.push_back({i, n, (int32_t)step.rows[i]});
        }
    for (int64_t s = 0; s < model.n_slot; s++) {
        const Slot& slot = model.slots[s];
        work.emplace_back(model, slot, step, w.runs);
        last_work.emplace_back(model, slot, last, std::vector<Run>{});
        const int64_t parts = std::max(work.back().parts.size(), last_work.back().parts.size());
        results = std::max(results, parts * model.n_head * (padded(slot.head_dim) + 2));
    }
    for (int64_t l = 0; l < model.n_layer; l++) {
        const Layer& layer = model.layers[l];
        widest = std::max(widest, layer.c_fc.n), qkv = std::max(qkv, layer.c_attn.n);
        if (layer.owns) last_owner = l;
        if (layer.k_up) latents = model.n_head * model.slots[layer.slot].head_dim;
    }
    const Linear& linear = model.layers[0].c_fc;
    const int64_t most_groups = linear.dtype == INT4 ? widest / linear.group : 1;
    w.x.assign(m * C, 0);
    w.h.resize(m * C);
    w.y.resize(m * HD);
    w.qkv.resize(m * qkv);
    w.to_latents.resize(m * latents);
    w.of_latents.resize(m * latents);
    w.mlp.resize(m * widest);
    w.results.resize(results);
    w.values.resize(4 * (m + LANES) * widest);
    w.scale.resize(m);
    w.sum.resize(m * most_groups);
    Int8Rows rows{w.values.data(), w.scale.data(), w.sum.data()};
    float *x = w.x.data(), *h = w.h.data();
    Workspace* shared = &w;  // thread_local: the other threads have one of their own

    in_parallel(step.threads, [&] {
        share(m, [&](int64_t i) {
            if (model.wte) add_row(model.wte, model.wte_dtype, step.tokens[i], C, x + i * C);
            else add_int8_row(model.lm_head, step.tokens[i], x + i * C);
            if (model.wpe) add_row(model.wpe, model.wpe_dtype, step.positions[i], C, x + i * C);
        });
        const Step* now = &step;
        for (int64_t l = 0; l < model.n_layer && now->m; l++) {
            const Layer& layer = model.layers[l];
            norm_rows(x, layer.ln_1, layer.ln_1_bias, now->m, C, h);
            clamp(h, now->m * C, model.act_clamp);
            matmul(layer.c_attn, h, now->m, shared->qkv.data(), STORE, rows);
            queries_and_keys(model, layer, *now, work[layer.slot], *shared);
            if (l == last_owner && step.n_wanted < m) {
                share(2, 1, [&](int64_t k) { k ? keep_rows(step, C, x) : keep_rows(step, layer.c_attn.n, shared->qkv.data()); });
                now = &last;
            }
            attention(model, layer, *now, (now == &step ? work : last_work)[layer.slot], *shared);
            clamp(shared->y.data(), now->m * HD, model.act_clamp);
            matmul(layer.attn_proj, shared->y.data(), now->m, x, ADD, rows);
            norm_rows(x, layer.ln_2, layer.ln_2_bias, now->m, C, h);
            clamp(h, now->m * C, model.act_clamp);
            matmul(layer.c_fc, h, now->m, shared->mlp.data(), model.activation, rows);
            clamp(shared->mlp.data(), now->m * layer.c_fc.n, model.act_clamp);
            matmul(layer.mlp_proj, shared->mlp.data(), now->m, x, ADD, rows);
        }
        share(step.n_wanted, [&](int64_t r) {
            const int64_t row = now == &step ? step.wanted[r] : r;
            layer_norm(x + row * C, model.ln_f, model.ln_f_bias, C, h + r * C);
        });
        matmul(model.lm_head, h, step.n_wanted, step.logits, STORE, rows);
    });
}

extern "C" void nanokv_attend(const Chunk* chunk) {
    const Chunk& c = *chunk;
    const int64_t pairs = c.B * c.slot.n_kv_head, group = c.H / c.slot.n_kv_head;
    const int64_t size = block_size(group, pairs, c.t, c.threads), blocks = (c.t + size - 1) / size;
    const Slot& slot = c.slot;
    auto attend = slot.scaled() ? attend_block<int8_t> : slot.dtype == BFLOAT16 ? attend_block<uint16_t> : attend_block<float>;
    in_parallel(c.threads, [&] {
        ChunkRoom room(group * size, slot.head_dim);
        share(blocks * pairs, 1, [&](int64_t item) {  // the last queries first: they see the most keys
            const int64_t first = (blocks - 1 - item / pairs) * size, b = item % pairs / slot.n_kv_head;
            const int64_t n = std::min(size, c.n[b] - first);
            if (n > 0) attend(c, b, item % slot.n_kv_head, first, n, 1 / std::sqrt((float)slot.head_dim), room);
        });
    });
}

// y (m, n) = x (m, k) @ weight.T + bias
extern "C" void nanokv_linear(const Linear* linear, const float* x, int64_t m, float* y, int64_t threads) {
    bool quantized = linear->dtype == INT8 || linear->dtype == INT4;
    Buffer<activation_t> values(quantized ? m * linear->k : 4 * (m + LANES) * linear->k);
    Buffer<float> scale(m);
    Buffer<int32_t> sums(quantized ? m * linear->k / linear->group : 0);
    Int8Rows rows{values.data(), scale.data(), sums.data()};
    in_parallel(threads, [&] { matmul(*linear, x, m, y, STORE, rows); });
}

extern "C" int64_t nanokv_sizes(int64_t which) {  // of the structs, to compare with those in Python
    const int64_t sizes[] = {sizeof(Linear), sizeof(Slot), sizeof(Layer), sizeof(Model), sizeof(Step),
                             sizeof(Chunk)};
    return sizes[which];
}
