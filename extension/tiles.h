// Matmuls on tiles of 16 rows of 64 bytes (AMX), where the processor has them and the system allows it.
#pragma once
#include <cstdint>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1

static bool tiles_wanted = true;
static bool tiles() {  // Linux gives them to processes that ask: ARCH_REQ_XCOMP_PERM, XTILEDATA
    static const bool allowed = !syscall(SYS_arch_prctl, 0x1023, 18);
    return allowed && tiles_wanted;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
};
static const TileConfig SEVEN_TILES;

struct WithTiles {  // while it exists, its thread has them; torch's own matmuls want them unset
    const bool on;
    explicit WithTiles(bool wanted) : on(wanted && tiles()) { if (on) _tile_loadconfig(&SEVEN_TILES); }
    ~WithTiles() { if (on) _tile_release(); }
};

// sums (16, N, 16) of products of 16 rows `a` of int8 (HALF: bfloat16) with N blocks of 16 rows `b` of uint8
// (bfloat16), in which 4 bytes of each row are together. Meanwhile `ahead` rows at `next` are fetched.
template <int N, bool HALF>
static void tile_sums(const void* a, const void* b, int64_t row_bytes, const void* next, int64_t ahead, void* sums) {
    const char *rows = (const char*)a, *block = (const char*)b;
    asm volatile("" ::: "memory");  // what is loaded has been stored
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
#define ADD(sum, tile)                                                       \
    _tile_loadd(tile, block + (sum * row_bytes + i) * 16, 64);               \
    if constexpr (HALF) { _tile_dpbf16ps(sum, 3, tile); } else { _tile_dpbsud(sum, 3, tile); }
    for (int64_t i = 0; i < row_bytes; i += 64) {
        for (int64_t r = 0; r < ahead; r++) __builtin_prefetch((const char*)next + i * ahead + 64 * r, 0, 2);
        _tile_loadd(3, rows + i, row_bytes);
        ADD(0, 4)
        if constexpr (N > 1) { ADD(1, 5) }
        if constexpr (N > 2) { ADD(2, 6) }
    }
    _tile_stored(0, (int32_t*)sums, 64 * N);
    if constexpr (N > 1) _tile_stored(1, (int32_t*)sums + 16, 64 * N);
    if constexpr (N > 2) _tile_stored(2, (int32_t*)sums + 32, 64 * N);
}
#undef ADD
#else
static bool tiles_wanted;
static bool tiles() { return false; }
struct WithTiles { explicit WithTiles(bool) {} };
#endif

extern "C" int32_t nanokv_tiles(int32_t wanted) {  // whether matmuls use them from now on
    tiles_wanted = wanted;
    return tiles();
}
