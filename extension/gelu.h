// GELU of a tensor, and its gradient, as the extensions of training and of the engine export it.
#pragma once
#include "kernels.h"

INLINE f16x gelu_slope(f16x x, bool tanh) {
    if (!tanh) {
        const f16x bell = exp16(x * x * -0.5f), tail = lower_tail(x, bell);
        return select(x < 0.0f, tail, 1.0f - tail) + x * bell * 0.39894228f;
    }
    const f16x squares = x * x, z = x * 1.59576912f * (squares * 0.044715f + 1.0f);
    const f16x e = exp16(at_most(z, 87.0f)), rest = 1.0f / (e + 1.0f), share = e * rest;  // 1 - rest
    return share + x * share * rest * (squares * 0.134145f + 1.0f) * 1.59576912f;
}

// Call f(i, n) for each 16 elements; n < 16 at the end.
template <typename F>
static void each16(int64_t threads, int64_t size, F f) {
    for_each(threads, (size + LANES - 1) / LANES, 1024, [=](int64_t i) {
        f(i * LANES, std::min<int64_t>(LANES, size - i * LANES));
    });
}

template <typename T>
INLINE f16x load_some(const T* p, int64_t n) {
    if (n == LANES) return load(p);
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

INLINE void store_some(float* p, f16x x, int64_t n) {
    if (n == LANES) store(p, x);
    else memcpy(p, &x, n * sizeof(float));
}
INLINE void store_some(uint16_t* p, f16x x, int64_t n) {
    float y[LANES];
    store(y, x);
    for (int64_t i = 0; i < n; i++) p[i] = to_bfloat16(y[i]);
}

// y = GELU(x); with dy, y = dy times GELU's slope at x.
template <typename T>
static void gelu(int64_t threads, const T* x, const T* dy, T* y, int64_t size, bool tanh) {
    each16(threads, size, [=](int64_t i, int64_t n) {
        const f16x at = load_some(x + i, n);
        store_some(y + i, dy ? load_some(dy + i, n) * gelu_slope(at, tanh) : gelu(at, tanh), n);
    });
}

extern "C" void nanokv_gelu(int64_t threads, const void* x, const void* dy, void* y, int64_t size,
                            int32_t tanh, int32_t half) {
    if (half) gelu(threads, (const uint16_t*)x, (const uint16_t*)dy, (uint16_t*)y, size, tanh);
    else gelu(threads, (const float*)x, (const float*)dy, (float*)y, size, tanh);
}
