// Linear layers with AMX tiles for many rows, and with vectors for few.
//
// x is cut into tiles of up to 16 rows and chunks of 64 bytes; a chunk of a panel is 16 lines. Two
// tiles of x by two panels are multiplied at once. Rows that a tile has beyond those of x are never
// read from the sums. The last chunk of a panel, and of each group of int4, is filled up with zeros.
#define BF16_DOT
#include "linear_ops512.h"
//
#include "linear_kernel.h"
#include "tiles.h"

namespace {

constexpr int TILE_ROWS = 16, CHUNK = 1024, CHUNK_LINES = 16;
constexpr int64_t VECTOR_ROWS = 4;  // so many rows cost vectors less than memory takes
constexpr int64_t TILE_AHEAD = 4096;

struct TiledX {
  int64_t tiles, tile_rows;        // all tiles have so many rows, the last ones maybe fewer of x
  int64_t group_chunks, chunks;    // of a group (int4), of a row
  int64_t groups;
  char* x;                         // [tiles][chunks][16][64]
  float* scales;                   // int8: [tiles * 16]; int4: [tiles][groups][16]
  int32_t* offsets;
};

TiledX tiled(const RlLinear& call, char* scratch, int64_t rows) {
  const RlMatrix& m = call.matrix;
  TiledX t{};
  t.tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  t.tile_rows = (rows + t.tiles - 1) / t.tiles;
  t.groups = m.format == RL_W_INT4 ? num_groups(m) : 1;
  int64_t numbers = m.format == RL_W_BF16 ? 32 : 64;
  int64_t a_group = m.format == RL_W_INT4 && m.group < m.inputs ? m.group : m.inputs;
  t.group_chunks = (a_group + numbers - 1) / numbers;
  t.chunks = t.group_chunks * t.groups;
  t.x = scratch;
  int64_t beside = up(4 * t.tiles * t.groups * TILE_ROWS, 64);
  t.scales = reinterpret_cast<float*>(scratch + t.tiles * t.chunks * CHUNK);
  t.offsets = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(t.scales) + beside);
  return t;
}

int64_t tiled_bytes(const RlLinear& call, int64_t rows) {
  TiledX t = tiled(call, nullptr, rows);
  return t.tiles * t.chunks * CHUNK + 2 * up(4 * t.tiles * t.groups * TILE_ROWS, 64);
}

// Both panels of int4 as bytes, when several pairs of tiles need them.
int64_t unpacked_bytes(const RlLinear& call, int64_t rows) {
  TiledX t = tiled(call, nullptr, rows);
  bool again = call.matrix.format == RL_W_INT4 && t.tiles > 2;
  return again ? 2 * t.chunks * CHUNK : 0;
}

void put_bytes(const void* from, int64_t bytes, char* out) {  // into rows of chunks
  const char* source = static_cast<const char*>(from);
  for (; bytes > 0; bytes -= LINE, source += LINE, out += CHUNK) {
    int64_t here = bytes < LINE ? bytes : int64_t(LINE);
    std::memcpy(out, source, size_t(here));
    if (here < LINE) std::memset(out + here, 0, size_t(LINE - here));
  }
}

void tile_bf16_row(const RlLinear& call, int64_t row, char* out) {
  float piece[PIECE];
  bf16 rounded[PIECE];
  int64_t inputs = call.matrix.inputs;
  for (int64_t begin = 0; begin < inputs; begin += PIECE) {
    int64_t count = inputs - begin < PIECE ? inputs - begin : PIECE;
    load_floats(call, row, begin, count, piece);
    for (int64_t i = 0; i < count; ++i) rounded[i] = to_bf16(piece[i]);
    put_bytes(rounded, count * 2, out + begin * 2 / LINE * CHUNK);
  }
}

void tile_int8_row(const RlLinear& call, int64_t row, char* out, float* scale, int32_t* offset) {
  float piece[PIECE];
  int8_t codes[PIECE];
  int64_t inputs = call.matrix.inputs;
  float most = row_magnitude(call, row, piece), inverse = inverse_of(most);
  int32_t sum = 0;
  for (int64_t begin = 0; begin < inputs; begin += PIECE) {
    int64_t count = inputs - begin < PIECE ? inputs - begin : PIECE;
    load_floats(call, row, begin, count, piece);
    sum += round_codes(piece, count, inverse, codes);
    put_bytes(codes, count, out + begin / LINE * CHUNK);
  }
  *scale = most / 127.0f;
  *offset = -128 * sum;
}

void tile_int4_row(const RlLinear& call, const TiledX& t, int64_t row, char* out, float* scales,
                   int32_t* offsets) {
  float piece[PIECE];
  int8_t codes[PIECE];
  int64_t inputs = call.matrix.inputs, group = call.matrix.group;
  for (int64_t begin = 0, g = 0; begin < inputs; begin += group, ++g) {
    int64_t count = inputs - begin < group ? inputs - begin : group;
    load_floats(call, row, begin, count, piece);
    float most = magnitude(piece, count);
    scales[g * TILE_ROWS] = most / 127.0f;
    offsets[g * TILE_ROWS] = -8 * round_codes(piece, count, inverse_of(most), codes);
    char* chunk = out + g * t.group_chunks * CHUNK;
    put_bytes(codes, count, chunk);
    for (int64_t c = (count + LINE - 1) / LINE; c < t.group_chunks; ++c)
      std::memset(chunk + c * CHUNK, 0, LINE);
  }
}

void tile_prepare(const LinearPlan& plan, int task) {
  const RlLinear& call = *plan.call;
  TiledX t = tiled(call, plan.scratch, plan.rows);
  int64_t tile = task / t.tile_rows, inside = task % t.tile_rows, row = plan.row_begin + task;
  char* out = t.x + tile * t.chunks * CHUNK + inside * LINE;
  int64_t beside = tile * t.groups * TILE_ROWS + inside;
  if (call.matrix.format == RL_W_BF16)
    tile_bf16_row(call, row, out);
  else if (call.matrix.format == RL_W_INT8)
    tile_int8_row(call, row, out, t.scales + beside, t.offsets + beside);
  else
    tile_int4_row(call, t, row, out, t.scales + beside, t.offsets + beside);
}

// ---- one or two tiles of x by one or two panels ------------------------------------------------

struct TileJob {
  const char* x[2];        // chunks of each tile
  const char* panel[2];    // lines
  const bf16* scale[2];    // int4
  const char* unpacked[2];  // int4: chunks, if they are there already; else null
  const float* x_scale[2];  // int4: [groups][16]
  const int32_t* x_offset[2];
  int64_t lines, group_lines, group_chunks, rows[2];
  float* out;  // [tile][panel][16][16]
};

template <int NM, int NP>
inline void zero_sums() {
  TILE_ZERO(0);
  if constexpr (NP > 1) TILE_ZERO(1);
  if constexpr (NM > 1) TILE_ZERO(2);
  if constexpr (NM > 1 && NP > 1) TILE_ZERO(3);
}

template <int NM, int NP>
inline void store_sums(void* out) {
  char* to = static_cast<char*>(out);
  TILE_STORE(0, to, LINE);
  if constexpr (NP > 1) TILE_STORE(1, to + CHUNK, LINE);
  if constexpr (NM > 1) TILE_STORE(2, to + 2 * CHUNK, LINE);
  if constexpr (NM > 1 && NP > 1) TILE_STORE(3, to + 3 * CHUNK, LINE);
}

template <int NM, int NP, bool IS_BF16>
inline void add_dots(const char* const* x, const char* const* panel) {
#define TILE_DOT(sum, a, b)        \
  if constexpr (IS_BF16)           \
    TILE_DOT_BF16(sum, a, b);      \
  else                             \
    TILE_DOT_BYTES(sum, a, b)
  TILE_LOAD(4, x[0], LINE);
  TILE_LOAD(6, panel[0], LINE);
  TILE_DOT(0, 4, 6);
  if constexpr (NP > 1) {
    TILE_LOAD(7, panel[1], LINE);
    TILE_DOT(1, 4, 7);
  }
  if constexpr (NM > 1) {
    TILE_LOAD(5, x[1], LINE);
    TILE_DOT(2, 5, 6);
    if constexpr (NP > 1) {
      TILE_DOT(3, 5, 7);
    }
  }
#undef TILE_DOT
}

inline void fetch_chunk(const char* at, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + TILE_AHEAD + i * LINE, 0, 3);
}

template <int NM, int NP, bool IS_BF16>
void tile_whole(const TileJob& j) {
  alignas(64) char rest[2][CHUNK];
  zero_sums<NM, NP>();
  int64_t chunk = 0;
  for (; (chunk + 1) * CHUNK_LINES <= j.lines; ++chunk) {
    const char *x[NM], *panel[NP];
    for (int m = 0; m < NM; ++m) x[m] = j.x[m] + chunk * CHUNK;
    for (int n = 0; n < NP; ++n) {
      panel[n] = j.panel[n] + chunk * CHUNK;
      fetch_chunk(panel[n], CHUNK_LINES);
    }
    add_dots<NM, NP, IS_BF16>(x, panel);
  }
  if (int64_t left = j.lines - chunk * CHUNK_LINES; left > 0) {
    const char *x[NM], *panel[NP];
    for (int m = 0; m < NM; ++m) x[m] = j.x[m] + chunk * CHUNK;
    for (int n = 0; n < NP; ++n) {
      std::memset(rest[n], 0, CHUNK);
      std::memcpy(rest[n], j.panel[n] + chunk * CHUNK, size_t(left * LINE));
      panel[n] = rest[n];
    }
    add_dots<NM, NP, IS_BF16>(x, panel);
  }
  store_sums<NM, NP>(j.out);
}

// `lines` (up to 8) of int4 as a chunk of bytes.
inline void unpack_chunk(const char* from, int64_t lines, char* out) {
  __m512i mask = _mm512_set1_epi8(15);
  for (int64_t k = 0; k < CHUNK_LINES / 2; ++k) {
    __m512i w = k < lines ? _mm512_load_si512(from + k * LINE) : _mm512_setzero_si512();
    _mm512_store_si512(out + 2 * k * LINE, _mm512_and_si512(w, mask));
    _mm512_store_si512(out + (2 * k + 1) * LINE,
                       _mm512_and_si512(_mm512_srli_epi16(w, 4), mask));
  }
}

template <int NM, int NP>
inline void add_scaled(const TileJob& j, int64_t g, const int32_t* sums) {
  for (int n = 0; n < NP; ++n) {
    __m512 scale = Ops::load_bf16(j.scale[n] + g * PANEL);
    for (int m = 0; m < NM; ++m) {
      const int32_t* from = sums + (m * 2 + n) * TILE_ROWS * PANEL;
      float* out = j.out + (m * 2 + n) * TILE_ROWS * PANEL;
      for (int64_t r = 0; r < j.rows[m]; ++r) {
        __m512i offset = _mm512_set1_epi32(j.x_offset[m][g * TILE_ROWS + r]);
        __m512i dots = _mm512_add_epi32(_mm512_load_si512(from + r * PANEL), offset);
        Ops::accumulate(out + r * PANEL, dots, scale, j.x_scale[m][g * TILE_ROWS + r]);
      }
    }
  }
}

template <int NM, int NP>
void tile_grouped(const TileJob& j) {
  alignas(64) char bytes[2][CHUNK];
  alignas(64) int32_t sums[4 * TILE_ROWS * PANEL];
  std::memset(j.out, 0, 4 * CHUNK);
  for (int64_t begin = 0, g = 0; begin < j.lines; begin += j.group_lines, ++g) {
    int64_t end = begin + j.group_lines < j.lines ? begin + j.group_lines : j.lines;
    zero_sums<NM, NP>();
    for (int64_t c = 0; begin + c * 8 < end; ++c) {
      int64_t at = g * j.group_chunks + c, line = begin + c * 8;
      const char *x[NM], *panel[NP];
      for (int m = 0; m < NM; ++m) x[m] = j.x[m] + at * CHUNK;
      for (int n = 0; n < NP; ++n) {
        panel[n] = j.unpacked[n] ? j.unpacked[n] + at * CHUNK : bytes[n];
        if (j.unpacked[n]) continue;
        fetch_chunk(j.panel[n] + line * LINE, 8);
        unpack_chunk(j.panel[n] + line * LINE, end - line, bytes[n]);
      }
      add_dots<NM, NP, false>(x, panel);
    }
    store_sums<NM, NP>(sums);
    add_scaled<NM, NP>(j, g, sums);
  }
}

template <int NM, int NP>
void tile_product(const TileJob& j, int format) {
  if (format == RL_W_BF16)
    tile_whole<NM, NP, true>(j);
  else if (format == RL_W_INT8)
    tile_whole<NM, NP, false>(j);
  else
    tile_grouped<NM, NP>(j);
}

void unpack_panel(const RlMatrix& m, const TiledX& t, const char* panel, char* out) {
  int64_t lines = panel_lines(m), group_lines = m.group / 8;
  for (int64_t begin = 0, g = 0; begin < lines; begin += group_lines, ++g) {
    int64_t end = begin + group_lines < lines ? begin + group_lines : lines;
    for (int64_t c = 0; begin + c * 8 < end; ++c)
      unpack_chunk(panel + (begin + c * 8) * LINE, end - begin - c * 8,
                   out + (g * t.group_chunks + c) * CHUNK);
  }
}

void tile_some(const LinearPlan& plan, const TiledX& t, char* area, const int64_t* panels,
               int num_panels) {
  const RlLinear& call = *plan.call;
  const RlMatrix& m = call.matrix;
  alignas(64) float raw[4 * TILE_ROWS * PANEL];
  TileJob j{};
  j.lines = panel_lines(m);
  j.group_lines = m.group / 8;
  j.group_chunks = t.group_chunks;
  j.out = raw;
  for (int n = 0; n < num_panels; ++n) {
    j.panel[n] = static_cast<const char*>(m.codes) + panels[n] * j.lines * LINE;
    if (m.format != RL_W_INT4) continue;
    j.scale[n] = static_cast<const bf16*>(m.scales) + panels[n] * t.groups * PANEL;
    if (!plan.thread_bytes) continue;
    char* unpacked = area + n * t.chunks * CHUNK;
    unpack_panel(m, t, j.panel[n], unpacked);
    j.unpacked[n] = unpacked;
  }
  for (int64_t tile = 0; tile < t.tiles; tile += 2) {
    int together = tile + 1 < t.tiles ? 2 : 1;
    for (int i = 0; i < together; ++i) {
      int64_t left = plan.rows - (tile + i) * t.tile_rows;
      j.rows[i] = left < 0 ? 0 : left < t.tile_rows ? left : t.tile_rows;
      j.x[i] = t.x + (tile + i) * t.chunks * CHUNK;
      j.x_scale[i] = t.scales + (tile + i) * t.groups * TILE_ROWS;
      j.x_offset[i] = t.offsets + (tile + i) * t.groups * TILE_ROWS;
    }
    if (together == 2)
      num_panels == 2 ? tile_product<2, 2>(j, m.format) : tile_product<2, 1>(j, m.format);
    else
      num_panels == 2 ? tile_product<1, 2>(j, m.format) : tile_product<1, 1>(j, m.format);
    for (int i = 0; i < together; ++i)
      finish_block(call, plan.row_begin + (tile + i) * t.tile_rows, j.rows[i], panels, num_panels,
                   j.x_scale[i], j.x_offset[i], raw + i * 2 * TILE_ROWS * PANEL, TILE_ROWS);
  }
}

void tile_multiply(const LinearPlan& plan, int thread, int64_t begin, int64_t end) {
  TiledX t = tiled(*plan.call, plan.scratch, plan.rows);
  TileConfig config = tile_config(int(t.tile_rows));
  TILE_CONFIGURE(config);
  char* area = plan.thread_scratch + thread * plan.thread_bytes;
  for (int64_t unit = begin; unit < end;) {
    int64_t panels[2] = {unit, plan.call->gated ? unit + plan.units : unit + 1};
    bool both = plan.call->gated || unit + 1 < end;
    tile_some(plan, t, area, panels, both ? 2 : 1);
    unit += both && !plan.call->gated ? 2 : 1;
  }
  TILE_RELEASE();
}

}  // namespace

LinearVariant linear_amx(int64_t rows) {
  if (rows <= VECTOR_ROWS) return vector_variant();
  return {tiled_bytes, prepare_tasks, tile_prepare, unpacked_bytes, tile_multiply};
}
