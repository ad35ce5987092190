// How is x kept for tiles? Tiles of up to 16 rows, in chunks of 64 bytes, with what is needed to
// make numbers of the sums again.
#pragma once

#include "tiles_ends.h"

namespace {

constexpr int TILE_ROWS = 16, CHUNK = 1024, CHUNK_LINES = 16;
constexpr int64_t PREPARED_ROWS = 4;  // by a task, if there are many
#ifndef RL_EMULATE_TILES
constexpr int64_t MANY_ROWS = 64;             // from here on a task has so many panels
constexpr int64_t BLOCK_TILES = 32;           // whose slabs are kept in the cache; even
constexpr int64_t CACHED_BYTES = 1280 << 10;  // of x: more is taken in slabs
constexpr int64_t SLAB_CHUNKS = 32;
#else  // so that small matrices go all ways
constexpr int64_t MANY_ROWS = 24, BLOCK_TILES = 2, CACHED_BYTES = 4096, SLAB_CHUNKS = 3;
#endif

struct TiledX {
  int64_t tiles, tile_rows;        // all tiles have so many rows, the last ones maybe fewer of x
  int64_t group_chunks, chunks;    // of a group, of a row
  int64_t slab_chunks, slabs;      // of a slab; in a row
  int64_t groups;
  char* x;                         // [tiles][chunks][16][64]
  float* scales;                   // int8: [tiles * 16]; groups: [tiles][groups][16]
  int32_t* offsets;                // int8: the sum of the codes * -128
};

TiledX tiled(const RlLinear& call, char* scratch, int64_t rows) {
  const RlMatrix& m = call.matrix;
  TiledX t{};
  t.tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  t.tile_rows = (rows + t.tiles - 1) / t.tiles;
  t.groups = has_groups(m.format) ? num_groups(m) : 1;
  int64_t numbers = m.format == RL_W_BF16 ? 32 : 64;
  int64_t a_group = has_groups(m.format) && m.group < m.inputs ? m.group : m.inputs;
  t.group_chunks = (a_group + numbers - 1) / numbers;
  t.chunks = t.group_chunks * t.groups;
  int64_t block = t.tiles < BLOCK_TILES ? t.tiles : BLOCK_TILES;
  t.slab_chunks = t.chunks;
  if (block * t.chunks * CHUNK > CACHED_BYTES && t.chunks > SLAB_CHUNKS) {
    t.slab_chunks = SLAB_CHUNKS;
    if (has_groups(m.format)) t.slab_chunks = up(SLAB_CHUNKS, t.group_chunks);
  }
  t.slabs = (t.chunks + t.slab_chunks - 1) / t.slab_chunks;
  t.x = scratch;
  t.scales = reinterpret_cast<float*>(scratch + t.tiles * t.chunks * CHUNK);
  t.offsets = reinterpret_cast<int32_t*>(t.scales + t.tiles * t.groups * TILE_ROWS);
  return t;
}

int64_t tiled_bytes(const RlLinear& call, int64_t rows) {
  TiledX t = tiled(call, nullptr, rows);
  return t.tiles * t.chunks * CHUNK + 4 * t.tiles * (t.groups + 1) * TILE_ROWS;
}

void tile_row(const LinearPlan& plan, const TiledX& t, int64_t index) {
  const RlLinear& call = *plan.call;
  const RlMatrix& m = call.matrix;
  int64_t tile = index / t.tile_rows, inside = index % t.tile_rows;
  Row row = row_of(call, plan.row_begin + index);
  char* out = t.x + tile * t.chunks * CHUNK + inside * LINE;
  int64_t beside = tile * t.groups * TILE_ROWS + inside;
  if (m.format == RL_W_BF16) return row_bf16(row, m.inputs, CHUNK, out);
  int64_t group = has_groups(m.format) && m.group < m.inputs ? m.group : m.inputs;
  for (int64_t begin = 0, g = 0; begin < m.inputs; begin += group, ++g) {
    int64_t count = m.inputs - begin < group ? m.inputs - begin : group;
    float most = row_most(row, begin, count);
    char* chunk = out + g * t.group_chunks * CHUNK;
    t.scales[beside + g * TILE_ROWS] = most / 127.0f;
    int32_t sum = row_codes(row, begin, count, inverse_of(most), CHUNK, chunk);
    if (m.format == RL_W_INT8) t.offsets[tile * TILE_ROWS + inside] = -128 * sum;
    for (int64_t c = (count + LINE - 1) / LINE; c < t.group_chunks; ++c)
      std::memset(chunk + c * CHUNK, 0, LINE);
  }
}

int64_t rows_a_task(int64_t rows) { return rows < MANY_ROWS ? 1 : PREPARED_ROWS; }

int tile_prepare_tasks(const LinearPlan& plan) {
  int64_t step = rows_a_task(plan.rows);
  return int((plan.rows + step - 1) / step);
}

void tile_prepare(const LinearPlan& plan, int task) {
  TiledX t = tiled(*plan.call, plan.scratch, plan.rows);
  int64_t step = rows_a_task(plan.rows), begin = task * step;
  int64_t end = begin + step < plan.rows ? begin + step : plan.rows;
  for (int64_t index = begin; index < end; ++index) tile_row(plan, t, index);
}

}  // namespace
