// Products of whole tiles, none of which is loaded or stored.
#include "peak.h"

#include "tiles.h"

int64_t peak_amx(int format, int64_t steps) {
  TileConfig config = tile_config(16);
  TILE_CONFIGURE(config);
  for (int64_t step = 0; step < steps; ++step) {
    if (format == RL_W_BF16) {
      TILE_DOT_BF16(0, 4, 6);
      TILE_DOT_BF16(1, 4, 7);
      TILE_DOT_BF16(2, 5, 6);
      TILE_DOT_BF16(3, 5, 7);
    } else {
      TILE_DOT_BYTES(0, 4, 6);
      TILE_DOT_BYTES(1, 4, 7);
      TILE_DOT_BYTES(2, 5, 6);
      TILE_DOT_BYTES(3, 5, 7);
    }
  }
  TILE_RELEASE();
  return 4 * 16 * PANEL * LINE * 2 / (format == RL_W_BF16 ? 2 : 1);
}
