// bfloat16, the upper half of a float, and 16 x 16 blocks of it as tiles take them (tiles.h). The plain versions
// do the same on other processors, for tests.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t to_bfloat16(float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if defined(__AVX512BF16__)
static inline void to_halves(const float* x, uint16_t* to) {  // 32 floats, to the nearest bfloat16
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
}

static inline void to_pairs(const float* x, uint16_t* to) {  // two rows of 16 floats: their columns as pairs
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(first, high, second),
                                                         _mm512_permutex2var_ps(first, low, second)));
}

// x (16, 16) of 4 bytes, in place. To interleave the upper half with the lower four times exchanges rows and columns.
static inline void transpose16(void* x) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 v[16], next[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_ps((float*)x + 16 * i);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            next[2 * i] = _mm512_permutex2var_ps(v[i], low, v[i + 8]);
            next[2 * i + 1] = _mm512_permutex2var_ps(v[i], high, v[i + 8]);
        }
        for (int i = 0; i < 16; i++) v[i] = next[i];
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_ps((float*)x + 16 * i, v[i]);
}

static inline void store_past_caches(float* to, const float* x) {  // 16 floats at a multiple of 64 bytes
    _mm512_stream_ps(to, _mm512_loadu_ps(x));
}
#else
static inline void to_halves(const float* x, uint16_t* to) {
    for (int i = 0; i < 32; i++) to[i] = to_bfloat16(x[i]);
}

static inline void to_pairs(const float* x, uint16_t* to) {
    for (int i = 0; i < 32; i++) to[i] = to_bfloat16(x[i % 2 * 16 + i / 2]);
}

static inline void transpose16(void* x) {
    typedef uint32_t __attribute__((may_alias)) word;
    word* v = (word*)x;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < i; j++) std::swap(v[16 * i + j], v[16 * j + i]);
}

static inline void store_past_caches(float* to, const float* x) { memcpy(to, x, 64); }
#endif
