// The structs of a decode step, and K and V in the cache's own storage. Included by decode.cpp.
#pragma once

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
    Linear gate;               // (H, C), of each head's result; without a weight: none
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
