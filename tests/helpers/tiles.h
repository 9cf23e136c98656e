// AMX in plain C++, for processors without it: -include this file. As Intel's Instruction Set
// Extensions Programming Reference describes TDPBSUD and TDPBF16PS, for whole tiles. Without AVX-512 BF16 the
// rest is plain C++, too: with AVX2 alone activations are stored in another form.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512BF16__)
#undef __AVX512F__
#undef __AVX2__
#undef __AVXVNNI__
#endif
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release

#ifndef FAULT
#define FAULT 0
#endif

struct Tile16 {
    union { uint8_t u8[16][64]; int8_t i8[16][64]; uint16_t half[16][32]; int32_t sums[16][16]; float floats[16][16]; };
};
static thread_local Tile16 emulated[8];
static thread_local bool configured = false;

static Tile16& emulated_tile(int i) {
    if (!configured || i > 7) __builtin_trap();
    return emulated[i];
}
static void emulated_config(const void* config) {
    uint8_t bytes[64];
    memcpy(bytes, config, 64);
    for (int i = 0; i < 64; i++) {
        const int expected = i == 0 ? 1 : i >= 16 && i < 32 ? (i % 2 ? 0 : 64) : i >= 48 && i < 56 ? 16 : 0;
        if (bytes[i] != expected) __builtin_trap();
    }
    configured = true;
    memset(emulated, 0, sizeof emulated);
}
static void emulated_load(int i, const void* from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(emulated_tile(i).u8[r], (const char*)from + r * stride, 64);
}
static void emulated_store(int i, void* to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char*)to + r * stride, emulated_tile(i).u8[r], 64);
}
static void emulated_dpbsud(int to, int i, int j) {
    Tile16 &c = emulated_tile(to), &a = emulated_tile(i), &b = emulated_tile(j);
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int p = 0; p < 4; p++) c.sums[m][n] += a.i8[m][4 * k + p] * (b.u8[k][4 * n + p] ^ (FAULT == 1));
}
static float emulated_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static void emulated_dpbf16ps(int to, int i, int j) {
    Tile16 &c = emulated_tile(to), &a = emulated_tile(i), &b = emulated_tile(j);
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int p = 0; p < 2; p++)
                    c.floats[m][n] += emulated_float(a.half[m][2 * k + p]) * emulated_float(b.half[k][2 * n + p])
                                      * (FAULT == 2 ? 1.01f : 1);
}
#define _tile_loadconfig emulated_config
#define _tile_release() (configured = false)
#define _tile_zero(i) memset(&emulated_tile(i), 0, sizeof(Tile16))
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbsud emulated_dpbsud
#define _tile_dpbf16ps emulated_dpbf16ps
#define syscall(...) 0
