// Matmuls on tiles of 16 rows of 64 bytes (AMX), where the processor has them and the system allows it.
#pragma once
#include <cstdint>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
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

extern "C" int32_t nanokv_tiles(int32_t wanted) {  // whether matmuls use them from now on
    tiles_wanted = wanted;
    return tiles();
}
