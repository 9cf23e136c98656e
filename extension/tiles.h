// Matmuls on tiles of 16 rows of 64 bytes (AMX), where the processor has them and the system allows it; bfloat16.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

static bool tiles_wanted = true;
static bool tiles() {  // Linux gives them to processes that ask: ARCH_REQ_XCOMP_PERM, XTILEDATA
    static const bool allowed = !syscall(SYS_arch_prctl, 0x1023, 18);
    return allowed && tiles_wanted;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static const TileConfig EIGHT_TILES;

struct WithTiles {  // while it exists, its thread has them; torch's own matmuls want them unset
    const bool on;
    explicit WithTiles(bool wanted) : on(wanted && tiles()) { if (on) _tile_loadconfig(&EIGHT_TILES); }
    ~WithTiles() { if (on) _tile_release(); }
};

// sums (B, A, 16, 16): products of A times 16 rows `a` of int8 (HALF: bfloat16) with B blocks of 16 rows `b` of
// uint8 (bfloat16), in which 4 bytes of each row are together. A x B: up to 2 x 2, or 1 x 3, so that each tile
// that is loaded takes part in two products. Meanwhile `ahead` rows at `next` are fetched.
template <int A, int B, bool HALF>
static void tile_sums(const void* a, const void* b, int64_t row_bytes, const void* next, int64_t ahead, void* sums) {
    const char *rows = (const char*)a, *block = (const char*)b;
    char* to = (char*)sums;
    asm volatile("" ::: "memory");  // what is loaded has been stored
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define PRODUCT(sum, i, j) \
    if constexpr (HALF) { _tile_dpbf16ps(sum, i, j); } else { _tile_dpbsud(sum, i, j); }
    for (int64_t i = 0; i < row_bytes; i += 64) {
        for (int64_t r = 0; r < ahead; r++) __builtin_prefetch((const char*)next + i * ahead + 64 * r, 0, 2);
        _tile_loadd(4, rows + i, row_bytes);
        _tile_loadd(6, block + i * 16, 64);
        PRODUCT(0, 4, 6)
        if constexpr (A > 1) { _tile_loadd(5, rows + 16 * row_bytes + i, row_bytes); PRODUCT(1, 5, 6) }
        if constexpr (B > 1) { _tile_loadd(7, block + (row_bytes + i) * 16, 64); PRODUCT(2, 4, 7) }
        if constexpr (A > 1 && B > 1) { PRODUCT(3, 5, 7) }
        if constexpr (B > 2) { _tile_loadd(5, block + (2 * row_bytes + i) * 16, 64); PRODUCT(1, 4, 5) }
    }
#undef PRODUCT
    _tile_stored(0, to, 64);
    if constexpr (A > 1) _tile_stored(1, to + 1024, 64);
    if constexpr (B > 1) _tile_stored(2, to + A * 1024, 64);
    if constexpr (A > 1 && B > 1) _tile_stored(3, to + 3072, 64);
    if constexpr (B > 2) _tile_stored(1, to + 2048, 64);
}
#else
static bool tiles_wanted;
constexpr bool tiles() { return false; }
struct WithTiles { explicit WithTiles(bool) {} };
template <int A, int B, bool HALF>
static void tile_sums(const void*, const void*, int64_t, const void*, int64_t, void*) {}
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

// What goes into tiles and comes out of them. The plain versions do the same on other processors, for tests.
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

extern "C" int32_t nanokv_tiles(int32_t wanted) {  // whether matmuls use them from now on
    tiles_wanted = wanted;
    return tiles();
}
