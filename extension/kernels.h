// Vectors, matmuls and row operations of the decode step (decode.cpp). Plain C++ on GCC's and Clang's
// vector types, for any processor; only the dot products of int8 and bfloat16 name instructions.
//
// Loops in `share` are divided among the threads of the region that calls them (threads.h): every
// function with one is called by all of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "threads.h"
#include "tiles.h"

#define INLINE static inline __attribute__((always_inline))
#define VECTOR(bytes) __attribute__((vector_size(bytes), aligned(1), may_alias))  // at any address

// -- vectors of 16 elements -----------------------------------------------------------------------

// Compilers keep a vector that is wider than the processor's registers in memory, and load and
// store it at every use. So 16 floats are one register of 16, or two halves that are.
#if defined(__AVX512F__)
constexpr int PART = 16;
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif
constexpr int LANES = 16;
constexpr bool WIDE = PART == LANES;
typedef float f4x __attribute__((vector_size(16)));
typedef float f8x __attribute__((vector_size(32)));
typedef float floats VECTOR(PART * 4);
typedef int32_t ints VECTOR(PART * 4);
typedef uint32_t words VECTOR(PART * 4);
typedef uint16_t shorts VECTOR(PART * 2);
typedef int8_t chars VECTOR(PART);

template <typename V>
struct Two {
    V lo, hi;
    template <typename W>
    explicit operator Two<W>() const { return {(W)lo, (W)hi}; }  // the same bits
};
#define OPERATOR(op)                                                                               \
    template <typename V>                                                                          \
    INLINE auto operator op(Two<V> a, Two<V> b) {                                                  \
        return Two<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi};                            \
    }                                                                                              \
    template <typename V, typename S, typename = std::enable_if_t<std::is_arithmetic_v<S>>>        \
    INLINE auto operator op(Two<V> a, S b) {                                                       \
        return Two<decltype(a.lo op b)>{a.lo op b, a.hi op b};                                     \
    }                                                                                              \
    template <typename V, typename S, typename = std::enable_if_t<std::is_arithmetic_v<S>>>        \
    INLINE auto operator op(S a, Two<V> b) {                                                       \
        return Two<decltype(a op b.lo)>{a op b.lo, a op b.hi};                                     \
    }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(<) OPERATOR(>) OPERATOR(&) OPERATOR(|)
OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
template <typename V> INLINE Two<V> operator-(Two<V> a) { return {-a.lo, -a.hi}; }
template <typename V> INLINE Two<V> operator~(Two<V> a) { return {~a.lo, ~a.hi}; }
template <typename V, typename B> INLINE Two<V>& operator+=(Two<V>& a, B b) { return a = a + b; }

template <typename V>
using Sixteen = std::conditional_t<PART == 16, V, std::conditional_t<PART == 8, Two<V>, Two<Two<V>>>>;
typedef Sixteen<floats> f16x;
typedef Sixteen<ints> i16x;
typedef Sixteen<words> b64x;  // 64 bytes

enum Dtype : int32_t { FLOAT32, BFLOAT16, INT8, INT4 };

INLINE floats converted(ints x) { return __builtin_convertvector(x, floats); }
INLINE void get(floats& x, const float* p) { x = *(const floats*)p; }
INLINE void get(words& x, const uint32_t* p) { x = *(const words*)p; }
INLINE void get(floats& x, const uint16_t* p) {  // bfloat16: the upper half of a float
#if defined(__AVX512F__)
    x = (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    x = (floats)(__builtin_convertvector(*(const shorts*)p, ints) << 16);
#endif
}
INLINE void get(floats& x, const int8_t* p) {
#if defined(__AVX512F__)
    x = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    x = converted(__builtin_convertvector(*(const chars*)p, ints));
#endif
}
INLINE void put(float* p, floats x) { *(floats*)p = x; }
template <typename V, typename T> INLINE void get(Two<V>& x, const T* p) {
    get(x.lo, p);
    get(x.hi, p + sizeof(V) / 4);
}
template <typename V> INLINE void put(float* p, Two<V> x) {
    put(p, x.lo);
    put(p + sizeof(V) / 4, x.hi);
}
template <typename V> INLINE auto converted(Two<V> x) {
    return Two<decltype(converted(x.lo))>{converted(x.lo), converted(x.hi)};
}

template <typename T> INLINE f16x load(const T* p) { f16x x; get(x, p); return x; }
INLINE void store(float* p, f16x x) { put(p, x); }
INLINE b64x bytes(const uint8_t* p) { b64x x; get(x, (const uint32_t*)p); return x; }

template <typename T>
INLINE f16x load_half(const T* p) {  // 8 elements, zeros behind: where a width is no multiple of 16
    T padded[LANES] = {};
    memcpy(padded, p, LANES / 2 * sizeof(T));
    return load(padded);
}

INLINE float sum(f4x x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float sum(f8x x) {
    f4x lo, hi;
    memcpy(&lo, &x, 16);
    memcpy(&hi, (const char*)&x + 16, 16);
    return sum(lo + hi);
}
template <typename V> INLINE float sum(Two<V> x) { return sum(x.lo + x.hi); }
#if defined(__AVX512F__)
INLINE float sum(f16x x) {
    f8x lo, hi;
    memcpy(&lo, &x, 32);
    memcpy(&hi, (const char*)&x + 32, 32);
    return sum(lo + hi);
}
#endif

// lanes of a where the mask is -1
INLINE floats select(ints mask, floats a, floats b) { return mask ? a : b; }
template <typename V, typename M> INLINE Two<V> select(Two<M> mask, Two<V> a, Two<V> b) {
    return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}
INLINE f16x at_most(f16x x, float most) { return select(x > most, f16x{} + most, x); }

// e**x to 2e-7 (relative), for x up to 88: 2**n times a polynomial of the rest. n = -127, which is x below
// -87.7, gives 0, since products of 1e-38 are denormal, and take over 100 cycles each on Intel's processors.
// NaN stays.
INLINE f16x exp16(f16x x) {
    const f16x y = select(x < -88.0f, f16x{} - 88.0f, x);
    const f16x magic = f16x{} + 12582912.0f;  // 1.5 * 2**23: adding it rounds to a whole number
    f16x shifted = y * 1.44269504f + magic, n = shifted - magic;
    f16x r = y - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts (Cephes)
    f16x p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (f16x)(((i16x)shifted << 23) + (127 << 23));  // magic has no bits there
}

INLINE float exp1(float x) { return x < -87.0f ? 0 : std::exp(x); }

// The normal distribution's mass below -|x|, given exp(-x^2 / 2): half of erfc(z), z = |x| / sqrt 2,
// as t times a polynomial of t = 1 / (1 + 0.34 z), fitted to 4e-10.
INLINE f16x lower_tail(f16x x, f16x bell) {
    const f16x t = 1.0f / ((f16x)((i16x)x & 0x7fffffff) * (0.34f * 0.70710678f) + 1.0f);
    f16x p = t * -0.12349382859f + 0.54381778301f;
    p = p * t - 0.62551820388f;
    p = p * t + 0.60562100448f;
    p = p * t - 0.14303516881f;
    p = p * t + 0.15253518875f;
    return (p * t + 0.09007322470f) * t * bell;
}

INLINE f16x gelu_exact(f16x x) {
    const f16x tail = lower_tail(x, exp16(x * x * -0.5f));
    return x * select(x < 0.0f, tail, 1.0f - tail);
}

INLINE f16x gelu_tanh(f16x x) {
    f16x z = 1.59576912f * (x + 0.044715f * x * x * x);  // x * (1 + tanh(z / 2)) / 2
    return x / (1.0f + exp16(at_most(-z, 87.0f)));
}

INLINE f16x gelu(f16x x, bool tanh) { return tanh ? gelu_tanh(x) : gelu_exact(x); }

INLINE f16x relu2(f16x x) {  // NaN stays
    f16x y = select(x < 0.0f, f16x{}, x);
    return y * y;
}

INLINE int64_t padded(int64_t n, int64_t unit = LANES) { return (n + unit - 1) / unit * unit; }

// -- rows -----------------------------------------------------------------------------------------

INLINE float largest(const float* x, int64_t n) {  // NaN where one is, or infinity
    float most = 0, check = 0;
    #pragma omp simd reduction(max : most) reduction(+ : check)
    for (int64_t i = 0; i < n; i++) {
        float a = std::fabs(x[i]);
        most = a > most ? a : most;
        check += x[i] * 0.0f;
    }
    return most + check;
}

// The largest of x (n,), n a multiple of 16, or `most` if that is larger.
INLINE float largest_of(const float* x, int64_t n, float most) {
    f16x all = f16x{} + most;
    for (int64_t i = 0; i < n; i += LANES) all = select(load(x + i) > all, load(x + i), all);
    float lanes[LANES];
    store(lanes, all);
    return *std::max_element(lanes, lanes + LANES);
}

// x (n,) = exp(x - most), n a multiple of 16. Returns their sum.
INLINE float exponentials(float* x, int64_t n, float most) {
    f16x sums{};
    for (int64_t i = 0; i < n; i += LANES) {
        const f16x e = exp16(load(x + i) - most);
        store(x + i, e);
        sums += e;
    }
    return sum(sums);
}

static void layer_norm(const float* x, const float* gain, const float* bias, int64_t n, float* y) {
    float mean = 0, var = 0;
    #pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < n; i++) mean += x[i];
    mean /= n;
    #pragma omp simd reduction(+ : var)
    for (int64_t i = 0; i < n; i++) var += (x[i] - mean) * (x[i] - mean);
    float scale = 1 / std::sqrt(var / n + 1e-5f);
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * scale * gain[i] + (bias ? bias[i] : 0);
}

// turn: -1 rotates back.
static void norm_and_rotate(float* x, const float* gain, const float* cos, const float* sin,
                            int64_t n, float* scratch, float turn = 1) {
    if (gain) {
        float squares = 0;
        #pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
        float scale = 1 / std::sqrt(squares / n + 1e-6f);
        for (int64_t i = 0; i < n; i++) x[i] *= scale * gain[i];
    }
    if (!cos) return;
    memcpy(scratch, x, n * sizeof(float));
    for (int64_t i = 0, half = n / 2; i < half; i++) {
        x[i] = scratch[i] * cos[i] + scratch[i + half] * turn * sin[i];
        x[i + half] = scratch[i + half] * cos[i + half] + scratch[i] * turn * sin[i + half];
    }
}

// -- matmuls --------------------------------------------------------------------------------------

// A weight (n, k), as `engine/native/__init__.py` lays it out.
struct Linear {
    const void* weight;   // FLOAT32, BFLOAT16: rows. INT8, INT4: see `int8_tile`, `int4_tile`
    const void* scale;    // INT8: (n,) float32. INT4: (n / 16, k / group, 16) bfloat16
    const float* bias;    // (n,), or null
    int64_t n, k;
    int32_t dtype, group;  // columns of a scale: k for INT8
};

enum Finish : int32_t { STORE, ADD, GELU_EXACT, GELU_TANH, RELU2 };  // what becomes of a result

INLINE f16x finished(f16x value, const float* y, int finish) {
    if (finish == GELU_EXACT) return gelu_exact(value);
    if (finish == GELU_TANH) return gelu_tanh(value);
    if (finish == RELU2) return relu2(value);
    return finish == ADD ? value + load(y) : value;
}

// 16 results, of which `count` belong to y.
INLINE void finish16(f16x value, const float* bias, float* y, int64_t count, int finish) {
    if (count >= LANES) {
        if (bias) value += load(bias);
        return store(y, finished(value, y, finish));
    }
    float padded[LANES] = {}, old[LANES] = {};
    memcpy(old, y, count * sizeof(float));
    if (bias) memcpy(padded, bias, count * sizeof(float));
    f16x result = finished(value + load(padded), old, finish);
    memcpy(y, &result, count * sizeof(float));
}

// An activation in int8; with AVX2 alone in 16 bits, where the middle two of each four are exchanged
// (`dot4`).
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
typedef int16_t activation_t;
#else
typedef int8_t activation_t;
#endif
constexpr bool EXCHANGED = sizeof(activation_t) == 2;

// Rows of activations in int8: symmetric, one scale a row.
struct Int8Rows {
    activation_t* values;  // (m, k); of weights in floats the room of `float_matmul`
    float* scale;    // (m,)
    int32_t* sum;    // (m, k / group): of the values of each group
};

static void quantize_rows(const float* x, int64_t m, int64_t k, int64_t group, Int8Rows out) {
    share(m, [=](int64_t row) {
        const float* from = x + row * k;
        activation_t* to = out.values + row * k;
        float most = largest(from, k), inverse = most > 0 ? 127 / most : 0;
        for (int64_t start = 0; start < k; start += group) {
            int32_t total = 0;
            #pragma omp simd reduction(+ : total)
            for (int64_t i = start; i < start + group; i++) {
                int32_t value = (int32_t)std::nearbyint(from[i] * inverse);
                to[i] = (activation_t)value;
                total += value;
            }
            out.sum[(row * k + start) / group] = total;
        }
        out.scale[row] = most / 127;
        for (int64_t i = 0; EXCHANGED && i < k; i += 4) {
            uint64_t four;
            memcpy(&four, to + i, 8);
            four = (four & 0xffff00000000ffff) | (four & 0xffff0000) << 16 | (four >> 16 & 0xffff0000);
            memcpy(to + i, &four, 8);
        }
    });
}

// acc + 4 products a lane: weights (16 rows of 4) times 4 activations of x. The weights are
// unsigned, but for instructions that take signed bytes only.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED = true;
#else
constexpr bool SIGNED = false;
#endif
INLINE ints dot4(ints acc, words w, const activation_t* x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) && !defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)
    int32_t four;
    memcpy(&four, x, 4);
#endif
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__)  // bytes 0 and 2, then 1 and 3, in 16 bits each
    const words even = w & 0x00ff00ff, odd = (w >> 8) & 0x00ff00ff;
    int32_t two, others;
    memcpy(&two, x, 4);
    memcpy(&others, x + 2, 4);
    const __m256i x_even = _mm256_set1_epi32(two), x_odd = _mm256_set1_epi32(others);
    return acc + ((ints)_mm256_madd_epi16((__m256i)even, x_even)
                  + (ints)_mm256_madd_epi16((__m256i)odd, x_odd));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)vdupq_n_s32(four));
#else
    for (int j = 0; j < 4; j++) acc += (ints)((w >> (8 * j)) & 0xff) * (int32_t)x[j];
    return acc;
#endif
}
template <typename V, typename W> INLINE Two<V> dot4(Two<V> acc, Two<W> w, const activation_t* x) {
    return {dot4(acc.lo, w.lo, x), dot4(acc.hi, w.hi, x)};
}

// Weight rows that a thread takes at a time: about 192 KB, so that the threads read neighbouring
// memory, which is faster than two streams far apart; fewer where that would be all.
INLINE int64_t rows_at_once(const Linear& l, int64_t row_bytes, int64_t multiple) {
    int64_t rows = std::min<int64_t>(196608 / row_bytes, l.n / (4 * threads_here()));
    return std::max<int64_t>(1, rows / multiple);
}

// 16 results of a row of x -> y, from sums of products with bytes that are w + 128: too large by 128 * sum(x)
INLINE void finish_int8(const Linear& l, const Int8Rows& x, int64_t row, int64_t column, i16x sums, float* y, int finish) {
    const i16x dot = sums - (SIGNED ? 0 : 128) * x.sum[row];
    const f16x value = converted(dot) * (load((const float*)l.scale + column) * x.scale[row]);
    finish16(value, l.bias ? l.bias + column : nullptr, y, l.n - column, finish);
}

// R rows of x against BLOCKS blocks of 16 weight rows. A block has, for each group of 4 columns,
// its 16 rows' 4 bytes: one load for 64 products.
// UNROLL: groups of columns with sums of their own, so that no sum waits for the one before.
// Meanwhile the weights that this thread takes next are fetched, a line in `every`, after `wait`.
template <int R, int BLOCKS, int UNROLL>
static void int8_tile(const Linear& l, const Int8Rows& x, int64_t row, int64_t block, float* y, int finish,
                      int64_t wait, int64_t every) {
    const int64_t k = l.k;
    const uint8_t* w = (const uint8_t*)l.weight + block * LANES * k;
    const uint8_t* next = w + threads_here() * BLOCKS * LANES * k;
    const activation_t* values = x.values + row * k;
    i16x acc[R][BLOCKS][UNROLL];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < BLOCKS; b++)
            for (int u = 0; u < UNROLL; u++) acc[r][b][u] = i16x{};
    for (int64_t i = 0; i < k; i += 4 * UNROLL, wait--) {
        for (int b = 0; !wait && b < BLOCKS; b++)
            for (int u = 0; u < UNROLL; u++) __builtin_prefetch(next + (b * k + i + 4 * u) * LANES, 0, 2);
        if (!wait) wait = every;
        for (int u = 0; u < UNROLL && i + 4 * u < k; u++)
            for (int b = 0; b < BLOCKS; b++) {
                const b64x weights = bytes(w + (b * k + i + 4 * u) * LANES) ^ (SIGNED ? 0x80808080u : 0u);
                for (int r = 0; r < R; r++)
                    acc[r][b][u] = dot4(acc[r][b][u], weights, values + r * k + i + 4 * u);
            }
    }
    i16x sums[R][BLOCKS];  // a loop that is not unrolled may index these, and `acc` stays in registers
    for (int r = 0; r < R; r++)
        for (int b = 0; b < BLOCKS; b++) {
            sums[r][b] = acc[r][b][0];
            for (int u = 1; u < UNROLL; u++) sums[r][b] += acc[r][b][u];
        }
    for (int b = 0; b < BLOCKS; b++)
        for (int r = 0; r < R; r++) {
            const int64_t column = (block + b) * LANES;
            finish_int8(l, x, row + r, column, sums[r][b], y + (row + r) * l.n + column, finish);
        }
}

// Where the results of a matmul on tiles go. PAIRS: into activations of the next one, as `transpose_pairs` has them.
enum Results { ROWS, PAIRS };

// Sums of a tile, 16 rows of the weight from `column` on by 16 rows of x -> pairs of a group of the next matmul's x.
INLINE void finish_pairs(const Linear& l, int64_t group, int64_t column, f16x* sums, uint16_t* y, int finish) {
    for (int r = 0; r < LANES; r++)
        sums[r] = finished(sums[r] + (l.bias ? l.bias[column + r] : 0), nullptr, finish);
    for (int r = 0; r < LANES; r += 2)
        to_pairs((const float*)&sums[r], y + (group * l.n + column + r) * LANES);
}

// G groups of 16 rows of x, in int8 or (HALF) as `transpose_pairs` leaves them, against N blocks of 16 weight rows.
template <int G, int N, bool HALF, Results TO>
static void tile_block(const Linear& l, const Int8Rows& x, int64_t m, int64_t group, int64_t block, const char* next,
                       int64_t ahead, float* y, int finish) {
    const int64_t bytes = (HALF ? 2 : 1) * l.k;
    const char *of_x = (const char*)x.values + group * LANES * bytes, *of_w = (const char*)l.weight + block * LANES * bytes;
    // results that a core's cache cannot hold (2 MB): to write them past the caches takes half of the time
    const bool past_caches = m > 64 && m * l.n > 1 << 19 && finish != ADD && l.n % LANES == 0 && (uintptr_t)y % 64 == 0;
    alignas(64) f16x sums[G * N][LANES];
    if constexpr (HALF) tile_sums<N, G, true>(of_w, of_x, bytes, next, ahead, sums);
    else tile_sums<G, N, false>(of_x, of_w, bytes, next, ahead, sums);
    for (int i = 0; i < G * N; i++) {
        const int64_t g = group + (HALF ? i / N : i % G), column = (block + (HALF ? i % N : i / G)) * LANES;
        if constexpr (TO == PAIRS) {
            finish_pairs(l, g, column, sums[i], (uint16_t*)y, finish);
            continue;
        }
        if (HALF) transpose16(sums[i]);
        for (int64_t r = 0, row = g * LANES; r < LANES && row < m; r++, row++) {
            float *result = y + row * l.n + column, *to = past_caches ? (float*)&sums[i][r] : result;
            if (HALF) finish16(sums[i][r], l.bias ? l.bias + column : nullptr, to, LANES, finish);
            else finish_int8(l, x, row, column, (i16x)sums[i][r], to, finish);
            if (past_caches) store_past_caches(result, to);
        }
    }
}

// As many rows of x at a time as stay in a core's cache (1 MB) while it goes through the weights; of rows past the
// last one anything is read. bfloat16: whole blocks of 16 weight rows.
template <bool HALF, Results TO = ROWS>
static void tile_matmul(const Linear& l, const Int8Rows& x, int64_t m, float* y, int finish) {
    const int64_t unit = (HALF ? 2 : 1) * l.k * LANES, groups = (m + LANES - 1) / LANES;
    const int64_t blocks = HALF ? l.n / LANES : (l.n + LANES - 1) / LANES;
    const int64_t step = HALF || groups > 1 ? 2 : 3, panels = (blocks + step - 1) / step;
    const int64_t portion = std::max<int64_t>(2, (1 << 20) / unit / 2 * 2);
    share((groups + portion - 1) / portion * panels, 1, [&](int64_t i) {
        WithTiles here(true);
        const int64_t block = i % panels * step, n = std::min(step, blocks - block);
        int64_t group = i / panels * portion;
        const int64_t end = std::min(groups, group + portion), passes = (end - group + 1) / 2;
        const int64_t ahead = (step * LANES + passes - 1) / passes;
        const char* next = (const char*)l.weight + (block + threads_here() * step) * unit;
        for (; group < end; group += 2, next += ahead * unit / LANES) {
            const bool two = group + 1 < end;
            const auto of = n == 3 ? tile_block<1, HALF ? 2 : 3, HALF, TO>
                          : n == 2 ? two ? tile_block<2, 2, HALF, TO> : tile_block<1, 2, HALF, TO>
                                   : two ? tile_block<2, 1, HALF, TO> : tile_block<1, 1, HALF, TO>;
            of(l, x, m, group, block, next, ahead, y, finish);
        }
    });
}

// f(row, end, block) for all rows of x and blocks of weight rows: as many rows at a time, a multiple of
// `step`, as stay in `room` bytes of a core's cache while it goes through blocks.
template <typename F>
static void share_products(const Linear& l, int64_t m, int64_t blocks, int64_t chunk, int64_t room, int64_t step, F f) {
    const int64_t rows = std::max<int64_t>(16, room / (l.k * sizeof(activation_t)) / step * step);
    share((m + rows - 1) / rows * blocks, chunk, [&](int64_t i) {
        f(i / blocks * rows, std::min(m, i / blocks * rows + rows), i % blocks);
    });
}

// R rows at a time, then the rest at once
template <int R, int BLOCKS>
static void int8_rows(const Linear& l, const Int8Rows& x, int64_t row, int64_t end, int64_t block, float* y, int finish,
                      int64_t wait, int64_t every, int64_t most) {
    constexpr int U = !WIDE ? 1 + (R == 1) : R > 4 ? 1 : R > 1 ? 2 : 4;  // as many sums as there are registers for
    for (; R <= most && row + R <= end; row += R) int8_tile<R, BLOCKS, U>(l, x, row, block, y, finish, wait++, every);
    if constexpr (R > 1)
        if (row < end) int8_rows<R - 1, BLOCKS>(l, x, row, end, block, y, finish, wait, every, most);
}

static void int8_matmul(const Linear& l, const Int8Rows& x, int64_t m, float* y, int finish) {
    const int64_t blocks = (l.n + LANES - 1) / LANES, step = m < 8 || !WIDE ? 1 : 2;
    if (tiles() && m > 1 && l.k % 64 == 0) return tile_matmul<false>(l, x, m, y, finish);
    const int64_t chunk = step == 1 ? rows_at_once(l, l.k, LANES) : 1;
    share_products(l, m, (blocks + step - 1) / step, chunk, 131072, 8, [&](int64_t row, int64_t end, int64_t i) {
        const int64_t block = i * step;
        auto rows_of = step == 2 && block + 1 < blocks ? int8_rows<8, 2> : int8_rows<WIDE ? 8 : 4, 1>;
        const int64_t tiles = (end - row + 7) / 8;
        // for few rows the processor fetches well by itself; with narrower vectors nobody has measured it
        rows_of(l, x, row, end, block, y, finish, step == 1 ? l.k : 0, tiles, (end - row + tiles - 1) / tiles);
    });
}

// R rows of x against a block of 16 weight rows in groups of columns that have a scale. For each 8
// columns the block has 64 bytes: its 16 rows' first 4 columns in their lower halves, the next 4 in
// the upper ones. The halves are w + 8, which adds 8 * sum(x).
template <int R>
static void int4_tile(const Linear& l, const Int8Rows& x, int64_t row, int64_t block, float* y,
                      int finish) {
    const int64_t k = l.k, groups = k / l.group;
    const uint8_t* w = (const uint8_t*)l.weight + block * LANES * k / 2;
    const uint16_t* scale = (const uint16_t*)l.scale + block * LANES * groups;
    f16x acc[R] = {};
    for (int64_t g = 0; g < groups; g++) {
        i16x dot[R] = {};
        for (int64_t i = g * l.group; i < (g + 1) * l.group; i += 8) {
            b64x both = bytes(w + i * LANES / 2);
            for (int r = 0; r < R; r++) {
                const activation_t* values = x.values + (row + r) * k + i;
                dot[r] = dot4(dot4(dot[r], both & 0x0f0f0f0f, values), (both >> 4) & 0x0f0f0f0f, values + 4);
            }
        }
        f16x of_group = load(scale + g * LANES);
        for (int r = 0; r < R; r++)
            acc[r] += of_group * converted(dot[r] - 8 * x.sum[(row + r) * groups + g]);
    }
    const int64_t column = block * LANES;
    for (int r = 0; r < R; r++)
        finish16(acc[r] * x.scale[row + r], l.bias ? l.bias + column : nullptr,
                 y + (row + r) * l.n + column, l.n - column, finish);
}

static void int4_matmul(const Linear& l, const Int8Rows& x, int64_t m, float* y, int finish) {
    const int64_t blocks = (l.n + LANES - 1) / LANES, chunk = rows_at_once(l, l.k / 2, LANES);
    share_products(l, m, blocks, chunk, 131072, 8, [&](int64_t row, int64_t end, int64_t block) {
        for (; row + 4 <= end; row += 4) int4_tile<4>(l, x, row, block, y, finish);
        if (row + 2 <= end) int4_tile<2>(l, x, row, block, y, finish), row += 2;
        if (row < end) int4_tile<1>(l, x, row, block, y, finish);
    });
}

// Dot products of R rows of x with a row of a weight, which is read where it is: out[r * LANES]
template <int R, typename W>
static void float_tile(const W* w, const float* x, int64_t k, float* out) {
    constexpr int UNROLL = WIDE ? 4 : 2;  // sums of a product, so that none waits for the one before
    f16x acc[R][UNROLL] = {};
    int64_t i = 0;
    auto add = [&](int u, auto get) {
        f16x weight = get(w + i);
        for (int r = 0; r < R; r++) acc[r][u] += weight * get(x + r * k + i);
        i += LANES;
    };
    auto whole = [](auto* p) { return load(p); };
    while (i + UNROLL * LANES <= k)
        for (int u = 0; u < UNROLL; u++) add(u, whole);
    while (i + LANES <= k) add(0, whole);
    if (i < k) add(0, [](auto* p) { return load_half(p); });
    for (int r = 0; r < R; r++) {
        for (int u = 1; u < UNROLL; u++) acc[r][0] += acc[r][u];
        out[r * LANES] = sum(acc[r][0]);
    }
}

template <int R, typename W>
static void float_rows(const Linear& l, const float* x, int64_t row, int64_t column, float* y,
                       int finish) {
    float out[R * LANES] = {};
    const int64_t count = std::min<int64_t>(LANES, l.n - column);
    for (int64_t c = 0; c < count; c++)
        float_tile<R>((const W*)l.weight + (column + c) * l.k, x + row * l.k, l.k, out + c);
    for (int r = 0; r < R; r++)
        finish16(load(out + r * LANES), l.bias ? l.bias + column : nullptr,
                 y + (row + r) * l.n + column, count, finish);
}

// acc + products of 16 rows of x with one element of the weight, or a pair of them
INLINE f16x product(f16x acc, f16x x, const float* w) { return acc + x * *w; }
#if defined(__AVX512BF16__)
INLINE f16x product(f16x acc, f16x x, const uint16_t* w) {
    int32_t pair;
    memcpy(&pair, w, 4);
    return (f16x)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)_mm512_set1_epi32(pair));
}
template <typename W> constexpr int AT_ONCE = 4 / sizeof(W);
#else
INLINE f16x product(f16x acc, f16x x, const uint16_t* w) { return acc + x * from_bfloat16(*w); }
template <typename W> constexpr int AT_ONCE = 1;
#endif

// A group is 16 rows of x, transposed to (k, 16), for bfloat16 in pairs (k / 2, 16, 2): each element of
// the weight is multiplied by 16 rows at once, and no sum crosses lanes. out (C, V, 16): products of
// V groups with C rows of the weight. ahead: elements from which on the weight is fetched for later,
// or 0.
template <int V, int C, typename W>
__attribute__((noinline))  // else GCC keeps fewer sums in registers
static void group_tile(const W* w, const float* x, int64_t k, int64_t ahead, float* out) {
    memset(out, 0, C * V * LANES * sizeof(float));
    for (int64_t start = 0; start < k; start += 512) {  // rounding errors grow with a sum's length
        f16x acc[C][V] = {};
        for (int64_t i = start; i < std::min(k, start + 512); i += 8) {
            for (int c = 0; ahead && i % LANES == 0 && c < C; c++)
                __builtin_prefetch(w + c * k + i + ahead, 0, 2);
            for (int64_t j = i; j < i + 8; j += AT_ONCE<W>) {
                f16x value[V];
                for (int v = 0; v < V; v++) value[v] = load(x + (v * k + j) / AT_ONCE<W> * LANES);
                for (int c = 0; c < C; c++)
                    for (int v = 0; v < V; v++) acc[c][v] = product(acc[c][v], value[v], w + c * k + j);
            }
        }
        for (int c = 0; c < C; c++)
            for (int v = 0; v < V; v++) {
                float* to = out + (c * V + v) * LANES;
                store(to, load(to) + acc[c][v]);
            }
    }
}

constexpr int GROUPS = WIDE ? 3 : 1, COLUMNS = WIDE ? 8 : 4;  // of a tile, as many as registers hold

template <int V, typename W>
static void group_rows(const Linear& l, const float* x, int64_t group, int64_t m, int64_t column,
                       float* y, int finish) {
    alignas(64) float out[LANES][V * LANES];
    const int64_t k = l.k, count = std::min<int64_t>(LANES, l.n - column);
    // the other groups find the weights in the cache
    const int64_t ahead = group ? 0 : LANES * k;
    const W* w = (const W*)l.weight + column * k;
    x += group * LANES * k / AT_ONCE<W>;
    int64_t c = 0;
    for (; c + COLUMNS <= count; c += COLUMNS) group_tile<V, COLUMNS>(w + c * k, x, k, ahead, out[c]);
    for (; c < count; c++) group_tile<V, 1>(w + c * k, x, k, 0, out[c]);
    for (int64_t r = 0, row = group * LANES; r < V * LANES && row < m; r++, row++) {
        float value[LANES];
        for (int i = 0; i < LANES; i++) value[i] = out[i][r];
        finish16(load(value), l.bias ? l.bias + column : nullptr, y + row * l.n + column, count,
                 finish);
    }
}

// to: the first rows of x (m, k) in groups; those past m are undefined
template <typename W>
static void transpose(const float* x, int64_t m, int64_t k, int64_t groups, float* to) {
    share(groups * (k / 8), [=](int64_t item) {
        const int64_t group = item / (k / 8), i = item % (k / 8) * 8;
        for (int64_t r = 0; r < std::min<int64_t>(LANES, m - group * LANES); r++) {
            const float* from = x + (group * LANES + r) * k + i;
            float* unit = to + (group * k + i) / AT_ONCE<W> * LANES + r;
            if constexpr (AT_ONCE<W> == 1) {
                for (int j = 0; j < 8; j++) unit[j * LANES] = from[j];
            } else {
                uint16_t rounded[8];
                for (int j = 0; j < 8; j++) rounded[j] = to_bfloat16(from[j]);
                for (int j = 0; j < 4; j++) memcpy(unit + j * LANES, rounded + 2 * j, 4);
            }
        }
    });
}

// The same of bfloat16 in pairs, for tiles: k is a multiple of 32, and rows past m are zeros.
static void transpose_pairs(const float* x, int64_t m, int64_t k, int64_t groups, uint16_t* to) {
    share(groups * (k / 32), [=](int64_t item) {
        const int64_t row = item / (k / 32) * LANES, i = item % (k / 32) * 32;
        uint16_t* unit = to + row * k + i * LANES;  // (16, 32), then (16, 16) pairs
        for (int64_t r = 0; r < LANES; r++) {
            if (row + r < m) to_halves(x + (row + r) * k + i, unit + r * 32);
            else memset(unit + r * 32, 0, 64);
        }
        transpose16(unit);
    });
}

INLINE bool on_tiles(const Linear& l) { return l.dtype == BFLOAT16 && tiles() && l.k % 32 == 0; }

// room: for m + 16 rows of x. Up to three rows that are left over are faster one by one, except on tiles.
// With bfloat16 in pairs they are not, if there are others: the activations of a group are rounded, as
// torch has them, and rows of a batch must not differ in that. Tiles take whole blocks of 16 weight rows.
template <typename W>
static void float_matmul(const Linear& l, const float* x, int64_t m, float* y, int finish, Int8Rows room) {
    float* transposed = (float*)room.values;
    int64_t groups = (m + (AT_ONCE<W> == 2 && m > 3 ? 15 : 12)) / LANES, first = 0;
    if (on_tiles(l)) {
        transpose_pairs(x, m, l.k, (m + 15) / LANES, (uint16_t*)transposed);
        tile_matmul<true>(l, room, m, y, finish);
        if (l.n % LANES == 0) return;
        groups = 0, first = l.n / LANES;
    }
    if (groups) transpose<W>(x, m, l.k, groups, transposed);
    share((l.n + LANES - 1) / LANES - first, rows_at_once(l, l.k * sizeof(W), LANES), [&](int64_t block) {
        int64_t column = (first + block) * LANES, group = 0, row = groups * LANES;
        for (; group + GROUPS <= groups; group += GROUPS) group_rows<GROUPS, W>(l, transposed, group, m, column, y, finish);
        if (WIDE && group + 2 <= groups) group_rows<2, W>(l, transposed, group, m, column, y, finish), group += 2;
        if (group < groups) group_rows<1, W>(l, transposed, group, m, column, y, finish);
        for (; row + 2 <= m; row += 2) float_rows<2, W>(l, x, row, column, y, finish);
        if (row < m) float_rows<1, W>(l, x, row, column, y, finish);
    });
}

// y (m, n) = finish(x (m, k) @ weight.T + bias)
static void matmul(const Linear& l, const float* x, int64_t m, float* y, int finish, Int8Rows rows) {
    if (l.dtype == INT8 || l.dtype == INT4) {
        quantize_rows(x, m, l.k, l.group, rows);
        l.dtype == INT8 ? int8_matmul(l, rows, m, y, finish) : int4_matmul(l, rows, m, y, finish);
    } else if (l.dtype == BFLOAT16) {
        float_matmul<uint16_t>(l, x, m, y, finish, rows);
    } else {
        float_matmul<float>(l, x, m, y, finish, rows);
    }
}

// y (m, C) += proj(finish(fc(x))). On tiles the hidden activations are written as the second matmul reads them.
static void mlp(const Linear& fc, const Linear& proj, const float* x, int64_t m, float* hidden, float* y, int finish, Int8Rows rows) {
    if (on_tiles(fc) && on_tiles(proj) && proj.n % LANES == 0) {
        transpose_pairs(x, m, fc.k, (m + LANES - 1) / LANES, (uint16_t*)rows.values);
        tile_matmul<true, PAIRS>(fc, rows, m, hidden, finish);
        return tile_matmul<true>(proj, {(activation_t*)hidden, nullptr, nullptr}, m, y, ADD);
    }
    matmul(fc, x, m, hidden, finish, rows);
    matmul(proj, hidden, m, y, ADD, rows);
}

// -- small matmuls --------------------------------------------------------------------------------

// C (R x 16 N) = A B, or += A B. Element (i, k) of A is at a[i * rows + k * columns]; rows of B and
// of C are contiguous.
template <int R, int N>
INLINE void tile(int64_t depth, const float* a, int64_t rows, int64_t columns, const float* b,
                 int64_t b_row, float* c, int64_t c_row, bool add) {
    f16x acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = f16x{};
    for (int64_t k = 0; k < depth; k++) {
        f16x row[N];
        for (int n = 0; n < N; n++) row[n] = load(b + k * b_row + n * LANES);
        for (int r = 0; r < R; r++) {
            const float factor = a[r * rows + k * columns];
            for (int n = 0; n < N; n++) acc[r][n] += row[n] * factor;
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) {
            float* to = c + r * c_row + n * LANES;
            store(to, add ? load(to) + acc[r][n] : acc[r][n]);  // sums of sums are more exact
        }
}

template <int N>
static void column(int64_t m, int64_t depth, const float* a, int64_t rows, int64_t columns,
                   const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    constexpr int R = WIDE ? 12 / N : 6;  // as many sums as there are registers for
    int64_t i = 0;
    for (; i + R <= m; i += R)
        tile<R, N>(depth, a + i * rows, rows, columns, b, b_row, c + i * c_row, c_row, add);
    for (; i + 2 <= m; i += 2)
        tile<2, N>(depth, a + i * rows, rows, columns, b, b_row, c + i * c_row, c_row, add);
    if (i < m) tile<1, N>(depth, a + i * rows, rows, columns, b, b_row, c + i * c_row, c_row, add);
}
