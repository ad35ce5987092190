// How are AMX tiles used? The instructions, each of which says that it touches memory (the
// compiler's own intrinsics do not, and loads were moved past stores); with RL_EMULATE_TILES the
// same as plain code, for processors without them.
//
// Tiles: 0 .. 3 sums, 4 and 5 rows of x, 6 and 7 panels.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, zeros[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "as the processor reads it");

// Tiles with x and sums have `rows` rows, panels 16; all rows are 64 bytes.
[[maybe_unused]] inline TileConfig tile_config(int rows) {
  TileConfig config;
  std::memset(&config, 0, sizeof(config));
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = uint8_t(tile < 6 ? rows : 16);
  }
  return config;
}

}  // namespace

#ifndef RL_EMULATE_TILES

#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::: "memory")
#define TILE_LOAD(tile, from, stride)                                                     \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(from)),         \
                   "r"((int64_t)(stride))                                                 \
                   : "memory")
#define TILE_STORE(tile, to, stride)                                                      \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(to)),             \
                   "r"((int64_t)(stride))                                                 \
                   : "memory")
// sum += x * panel: pairs of bfloat16; fours of signed (x) by unsigned or signed (panel) bytes.
#define TILE_DOT_BF16(sum, x, panel) \
  __asm__ volatile("tdpbf16ps %%tmm" #panel ", %%tmm" #x ", %%tmm" #sum ::: "memory")
#define TILE_DOT_BYTES(sum, x, panel) \
  __asm__ volatile("tdpbsud %%tmm" #panel ", %%tmm" #x ", %%tmm" #sum ::: "memory")
#define TILE_DOT_SIGNED(sum, x, panel) \
  __asm__ volatile("tdpbssd %%tmm" #panel ", %%tmm" #x ", %%tmm" #sum ::: "memory")

#else

namespace {

struct EmulatedTiles {
  TileConfig config;
  uint8_t data[8][16][64];
};
thread_local EmulatedTiles emulated;

inline void emulated_load(int tile, const void* from, int64_t stride) {
  std::memset(emulated.data[tile], 0, sizeof(emulated.data[tile]));
  for (int row = 0; row < emulated.config.rows[tile]; ++row)
    std::memcpy(emulated.data[tile][row], static_cast<const char*>(from) + row * stride,
                emulated.config.row_bytes[tile]);
}

inline void emulated_store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < emulated.config.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated.data[tile][row],
                emulated.config.row_bytes[tile]);
}

inline void emulated_dot_bf16(int sum, int x, int panel) {
  for (int m = 0; m < emulated.config.rows[sum]; ++m)
    for (int k = 0; k < emulated.config.row_bytes[x] / 4; ++k)
      for (int n = 0; n < emulated.config.row_bytes[sum] / 4; ++n) {
        bf16 a[2], b[2];
        float c;
        std::memcpy(a, &emulated.data[x][m][4 * k], 4);
        std::memcpy(b, &emulated.data[panel][k][4 * n], 4);
        std::memcpy(&c, &emulated.data[sum][m][4 * n], 4);
        c += to_float(a[0]) * to_float(b[0]) + to_float(a[1]) * to_float(b[1]);
        std::memcpy(&emulated.data[sum][m][4 * n], &c, 4);
      }
}

inline void emulated_dot_bytes(int sum, int x, int panel, bool is_signed) {
  for (int m = 0; m < emulated.config.rows[sum]; ++m)
    for (int k = 0; k < emulated.config.row_bytes[x] / 4; ++k)
      for (int n = 0; n < emulated.config.row_bytes[sum] / 4; ++n) {
        int32_t c;
        std::memcpy(&c, &emulated.data[sum][m][4 * n], 4);
        for (int i = 0; i < 4; ++i)
          c += int32_t(int8_t(emulated.data[x][m][4 * k + i])) *
               (is_signed ? int32_t(int8_t(emulated.data[panel][k][4 * n + i]))
                          : int32_t(emulated.data[panel][k][4 * n + i]));
        std::memcpy(&emulated.data[sum][m][4 * n], &c, 4);
      }
}

}  // namespace

#define TILE_CONFIGURE(c) (emulated.config = (c))
#define TILE_RELEASE() std::memset(&emulated, 0, sizeof(emulated))
#define TILE_ZERO(tile) std::memset(emulated.data[tile], 0, sizeof(emulated.data[tile]))
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT_BF16(sum, x, panel) emulated_dot_bf16(sum, x, panel)
#define TILE_DOT_BYTES(sum, x, panel) emulated_dot_bytes(sum, x, panel, false)
#define TILE_DOT_SIGNED(sum, x, panel) emulated_dot_bytes(sum, x, panel, true)

#endif
