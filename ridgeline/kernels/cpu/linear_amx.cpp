// Linear layers with AMX tiles for many rows, and with vectors for few.
//
// x is cut into tiles of up to 16 rows and chunks of 64 bytes; a chunk of a panel is 16 lines. Two
// tiles of x by two panels are multiplied at once. Rows that a tile has beyond those of x are never
// read from the sums. The last chunk of a panel, and of each group, is filled with zeros.
//
// Where x is larger than a core's own cache it is taken in slabs of its inputs: a slab is
// multiplied by all panels of a task before the next, and the sums wait in between.
#define BF16_DOT
#include "linear_ops512.h"
//
#include "linear_kernel.h"
#include "tiles.h"
#include "tiles_ends.h"
#include "tiles_x.h"

namespace {

constexpr int64_t VECTOR_ROWS = 4;  // so many rows cost vectors less than memory takes
constexpr int64_t TILE_AHEAD = 4096;  // bytes of a panel that are asked for before their turn
constexpr int64_t FETCH_TILES = 8;
constexpr int64_t TASK_PANELS = 16;

int64_t unpacked_bytes(const RlLinear& call, const TiledX& t) {
  bool again = has_groups(call.matrix.format) && t.tiles > 2;
  return again ? 2 * t.slab_chunks * CHUNK : 0;
}

int64_t tile_units(const RlLinear& call, int64_t rows, int64_t units) {
  return rows < MANY_ROWS ? few_rows_units(call, units) : share(call, units, TASK_PANELS, 4);
}

// Both panels of groups as signed bytes, when several pairs of tiles need them; sums between slabs.
int64_t tile_thread_bytes(const RlLinear& call, int64_t rows) {
  TiledX t = tiled(call, nullptr, rows);
  int64_t block = up(t.tiles < BLOCK_TILES ? t.tiles : BLOCK_TILES, 2);
  return unpacked_bytes(call, t) + (t.slabs > 1 ? TASK_PANELS * block * CHUNK : 0);
}

// ---- one or two tiles of x by one or two panels ------------------------------------------------

struct TileJob {
  const char* x[2];        // chunks of each tile
  const char* panel[2];    // lines
  const void* scale[2];    // of groups
  const uint8_t* zero[2];  // of groups, or null
  int scale_dtype;
  const char* unpacked[2];  // of groups: chunks, if they are there already; else null
  const char* next[2];      // lines that will be wanted behind these
  const float* x_scale[2];  // of groups: [groups][16]
  int64_t lines, group_lines, group_chunks, rows[2];
  bool adds;   // to what `out` holds
  bool is_first;  // of those that read these panels: they may come from memory
  char* out;   // sums: [tile][panel][16][16], as float or as int32
};

template <int NM, int NP>
inline void zero_sums() {
  TILE_ZERO(0);
  if constexpr (NP > 1) TILE_ZERO(1);
  if constexpr (NM > 1) TILE_ZERO(2);
  if constexpr (NM > 1 && NP > 1) TILE_ZERO(3);
}

template <int NM, int NP>
inline void load_sums(const char* from) {
  TILE_LOAD(0, from, LINE);
  if constexpr (NP > 1) TILE_LOAD(1, from + CHUNK, LINE);
  if constexpr (NM > 1) TILE_LOAD(2, from + 2 * CHUNK, LINE);
  if constexpr (NM > 1 && NP > 1) TILE_LOAD(3, from + 3 * CHUNK, LINE);
}

template <int NM, int NP>
inline void store_sums(void* out) {
  char* to = static_cast<char*>(out);
  TILE_STORE(0, to, LINE);
  if constexpr (NP > 1) TILE_STORE(1, to + CHUNK, LINE);
  if constexpr (NM > 1) TILE_STORE(2, to + 2 * CHUNK, LINE);
  if constexpr (NM > 1 && NP > 1) TILE_STORE(3, to + 3 * CHUNK, LINE);
}

template <int NM, int NP, int FORMAT>
inline void add_dots(const char* const* x, const char* const* panel) {
#define TILE_DOT(sum, a, b)               \
  if constexpr (FORMAT == RL_W_BF16)      \
    TILE_DOT_BF16(sum, a, b);             \
  else if constexpr (FORMAT == RL_W_INT8) \
    TILE_DOT_BYTES(sum, a, b);            \
  else                                    \
    TILE_DOT_SIGNED(sum, a, b)
  // All loads first: as fast as with products between them, and faster while another hardware
  // thread works on the core. Asking for x ahead of its turn costs 7 %.
  TILE_LOAD(4, x[0], LINE);
  TILE_LOAD(6, panel[0], LINE);
  if constexpr (NM > 1) TILE_LOAD(5, x[1], LINE);
  if constexpr (NP > 1) TILE_LOAD(7, panel[1], LINE);
  TILE_DOT(0, 4, 6);
  if constexpr (NP > 1) {
    TILE_DOT(1, 4, 7);
  }
  if constexpr (NM > 1) {
    TILE_DOT(2, 5, 6);
    if constexpr (NP > 1) {
      TILE_DOT(3, 5, 7);
    }
  }
#undef TILE_DOT
}

// Ask for lines that lie some way behind byte `at` of a panel, or in the next one.
inline void fetch_ahead(const TileJob& j, int n, int64_t at, int lines) {
  int64_t wanted = at + TILE_AHEAD, rest = wanted - j.lines * LINE;
  const char* from = rest < 0 ? j.panel[n] + wanted : j.next[n] + rest;
  for (int i = 0; i < lines; ++i) __builtin_prefetch(from + i * LINE, 0, 3);
}

template <int NM, int NP, int FORMAT>
void tile_whole(const TileJob& j) {
  alignas(64) char rest[2][CHUNK];
  j.adds ? load_sums<NM, NP>(j.out) : zero_sums<NM, NP>();
  int64_t chunk = 0;
  for (; (chunk + 1) * CHUNK_LINES <= j.lines; ++chunk) {
    const char *x[NM], *panel[NP];
    for (int m = 0; m < NM; ++m) x[m] = j.x[m] + chunk * CHUNK;
    for (int n = 0; n < NP; ++n) {
      panel[n] = j.panel[n] + chunk * CHUNK;
      if (j.is_first) fetch_ahead(j, n, chunk * CHUNK, CHUNK_LINES);
    }
    add_dots<NM, NP, FORMAT>(x, panel);
  }
  if (int64_t left = j.lines - chunk * CHUNK_LINES; left > 0) {
    const char *x[NM], *panel[NP];
    for (int m = 0; m < NM; ++m) x[m] = j.x[m] + chunk * CHUNK;
    for (int n = 0; n < NP; ++n) {
      std::memset(rest[n], 0, CHUNK);
      std::memcpy(rest[n], j.panel[n] + chunk * CHUNK, size_t(left * LINE));
      panel[n] = rest[n];
    }
    add_dots<NM, NP, FORMAT>(x, panel);
  }
  store_sums<NM, NP>(j.out);
}

// Lines of groups in a chunk.
template <int FORMAT>
constexpr int64_t GROUP_LINES = FORMAT == RL_W_GROUPS8 ? CHUNK_LINES : CHUNK_LINES / 2;

// What is taken from the codes of 4 bits: the zero points of a group, or the middle.
template <int FORMAT>
inline __m512i bias_of(const uint8_t* zeros) {
  if (FORMAT != RL_W_GROUPS4 || zeros == nullptr) return _mm512_set1_epi8(8);
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
  return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(0x01010101));
}

// `lines` (up to GROUP_LINES) of codes as a chunk of signed bytes; x has zeros where there are no
// lines.
template <int FORMAT>
inline void unpack_chunk(const char* from, int64_t lines, __m512i bias, char* out) {
  if constexpr (FORMAT == RL_W_GROUPS8) {
    __m512i flip = _mm512_set1_epi8(-128);
    for (int64_t k = 0; k < CHUNK_LINES; ++k) {
      __m512i w = k < lines ? _mm512_load_si512(from + k * LINE) : flip;
      _mm512_store_si512(out + k * LINE, _mm512_xor_si512(w, flip));
    }
    return;
  }
  __m512i mask = _mm512_set1_epi8(15);
  for (int64_t k = 0; k < CHUNK_LINES / 2; ++k) {
    __m512i w = k < lines ? _mm512_load_si512(from + k * LINE) : _mm512_setzero_si512();
    __m512i low = _mm512_and_si512(w, mask);
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
    _mm512_store_si512(out + 2 * k * LINE, _mm512_sub_epi8(low, bias));
    _mm512_store_si512(out + (2 * k + 1) * LINE, _mm512_sub_epi8(high, bias));
  }
}

template <int NM, int NP, int FORMAT>
inline void add_scaled(const TileJob& j, int64_t g, const char* sums) {
  for (int n = 0; n < NP; ++n) {
    __m512 scale = FORMAT == RL_W_INT4
                       ? Ops::load_bf16(static_cast<const bf16*>(j.scale[n]) + g * PANEL)
                       : Ops::load_scales(j.scale[n], g * PANEL, j.scale_dtype);
    for (int m = 0; m < NM; ++m) {
      const char* from = sums + (m * 2 + n) * CHUNK;
      char* out = j.out + (m * 2 + n) * CHUNK;
      const float* x_scale = j.x_scale[m] + g * TILE_ROWS;
#pragma GCC unroll 4
      for (int64_t r = 0; r < j.rows[m]; ++r) {
        __m512 dots = _mm512_cvtepi32_ps(_mm512_load_si512(from + r * LINE));
        __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale[r]));
        _mm512_store_ps(out + r * LINE,
                        _mm512_fmadd_ps(dots, factor, _mm512_load_ps(out + r * LINE)));
      }
    }
  }
}

template <int NM, int NP, int FORMAT>
void tile_grouped(const TileJob& j) {
  constexpr int64_t LINES = GROUP_LINES<FORMAT>;
  alignas(64) char bytes[2][CHUNK];
  alignas(64) char sums[4 * CHUNK];
  if (!j.adds) std::memset(j.out, 0, 4 * CHUNK);
  for (int64_t begin = 0, g = 0; begin < j.lines; begin += j.group_lines, ++g) {
    int64_t end = begin + j.group_lines < j.lines ? begin + j.group_lines : j.lines;
    zero_sums<NM, NP>();
    for (int64_t c = 0; begin + c * LINES < end; ++c) {
      int64_t at = g * j.group_chunks + c, line = begin + c * LINES;
      const char *x[NM], *panel[NP];
      for (int m = 0; m < NM; ++m) x[m] = j.x[m] + at * CHUNK;
      for (int n = 0; n < NP; ++n) {
        panel[n] = j.unpacked[n] ? j.unpacked[n] + at * CHUNK : bytes[n];
        if (j.unpacked[n]) continue;
        if (j.is_first) fetch_ahead(j, n, line * LINE, LINES);
        const uint8_t* zeros = j.zero[n] ? j.zero[n] + g * PANEL : nullptr;
        unpack_chunk<FORMAT>(j.panel[n] + line * LINE, end - line, bias_of<FORMAT>(zeros),
                             bytes[n]);
      }
      add_dots<NM, NP, RL_W_INT4>(x, panel);
    }
    store_sums<NM, NP>(sums);
    add_scaled<NM, NP, FORMAT>(j, g, sums);
  }
}

template <int NM, int NP>
void tile_product(const TileJob& j, int format) {
  if (format == RL_W_BF16)
    tile_whole<NM, NP, RL_W_BF16>(j);
  else if (format == RL_W_INT8)
    tile_whole<NM, NP, RL_W_INT8>(j);
  else if (format == RL_W_INT4)
    tile_grouped<NM, NP, RL_W_INT4>(j);
  else if (format == RL_W_GROUPS4)
    tile_grouped<NM, NP, RL_W_GROUPS4>(j);
  else
    tile_grouped<NM, NP, RL_W_GROUPS8>(j);
}

// ---- the tasks -------------------------------------------------------------------------------

struct Slab {  // a part of the inputs: where it begins
  int64_t chunk, line, lines, group;
};

Slab slab_at(const RlMatrix& m, const TiledX& t, int64_t index) {
  Slab s{index * t.slab_chunks, 0, 0, 0};
  int64_t all = panel_lines(m), most = t.slab_chunks * CHUNK_LINES;
  s.line = s.chunk * CHUNK_LINES;
  if (has_groups(m.format)) {
    int64_t group_lines = m.group / line_inputs(m.format);
    s.group = s.chunk / t.group_chunks;
    s.line = s.group * group_lines;
    most = t.slab_chunks / t.group_chunks * group_lines;
  }
  s.lines = all - s.line < most ? all - s.line : most;
  return s;
}

template <int FORMAT>
void unpack_slab(const RlMatrix& m, const TiledX& t, const Slab& s, const char* lines,
                 const uint8_t* zeros, char* out) {
  constexpr int64_t LINES = GROUP_LINES<FORMAT>;
  int64_t group_lines = m.group / line_inputs(FORMAT);
  for (int64_t begin = 0, g = 0; begin < s.lines; begin += group_lines, ++g) {
    int64_t end = begin + group_lines < s.lines ? begin + group_lines : s.lines;
    __m512i bias = bias_of<FORMAT>(zeros ? zeros + g * PANEL : nullptr);
    for (int64_t c = 0; begin + c * LINES < end; ++c)
      unpack_chunk<FORMAT>(lines + (begin + c * LINES) * LINE, end - begin - c * LINES, bias,
                           out + (g * t.group_chunks + c) * CHUNK);
  }
}

void unpack_any(const RlMatrix& m, const TiledX& t, const Slab& s, const char* lines,
                const uint8_t* zeros, char* out) {
  if (m.format == RL_W_INT4)
    unpack_slab<RL_W_INT4>(m, t, s, lines, zeros, out);
  else if (m.format == RL_W_GROUPS4)
    unpack_slab<RL_W_GROUPS4>(m, t, s, lines, zeros, out);
  else
    unpack_slab<RL_W_GROUPS8>(m, t, s, lines, zeros, out);
}

struct Pair {  // one or two panels that are multiplied together
  int64_t panels[2];
  int count;
};

Pair pair_at(const LinearPlan& plan, int64_t unit, int64_t end) {
  if (plan.call->gated) return {{unit, unit + plan.units}, 2};
  return {{unit, unit + 1}, unit + 1 < end ? 2 : 1};
}

void multiply_pair(const TileJob& j, int tiles, int panels, int format) {
  if (tiles == 2)
    panels == 2 ? tile_product<2, 2>(j, format) : tile_product<2, 1>(j, format);
  else
    panels == 2 ? tile_product<1, 2>(j, format) : tile_product<1, 1>(j, format);
}

struct Work {  // of a thread
  const LinearPlan& plan;
  TiledX t;
  char *unpacked, *sums;  // of groups; between slabs: [pairs][tiles / 2][4][16][16]
};

const char* lines_of(const RlMatrix& m, int64_t panel, const Slab& s) {
  return static_cast<const char*>(m.codes) + (panel * panel_lines(m) + s.line) * LINE;
}

// While a pair of panels is multiplied by many tiles, the next one comes from memory bit by bit.
inline void fetch_part(const TileJob& j, int64_t part, int64_t parts) {
  int64_t bytes = up(j.lines * LINE / parts, LINE);
  for (int n = 0; n < 2; ++n)
    for (int64_t at = 0; at < bytes; at += LINE)
      __builtin_prefetch(j.next[n] + part * bytes + at, 0, 2);
}

// A slab of two panels by the tiles [begin, end); `next` is the pair that follows.
void multiply_slab(const Work& w, const Pair& pair, const Pair& next, int64_t index, int64_t begin,
                   int64_t end, char* sums) {
  const RlLinear& call = *w.plan.call;
  const RlMatrix& m = call.matrix;
  const TiledX& t = w.t;
  Slab s = slab_at(m, t, index);
  alignas(64) char raw[4 * CHUNK];
  TileJob j{};
  j.lines = s.lines;
  j.group_lines = m.group / line_inputs(m.format);
  j.scale_dtype = m.scale_dtype;
  j.group_chunks = t.group_chunks;
  j.adds = index > 0;
  for (int n = 0; n < pair.count; ++n) {
    int64_t panel = pair.panels[n];
    j.panel[n] = lines_of(m, panel, s);
    j.next[n] = lines_of(m, next.panels[n], s);
    if (!has_groups(m.format)) continue;
    int64_t beside = (panel * t.groups + s.group) * PANEL;
    j.scale[n] = static_cast<const char*>(m.scales) + beside * scale_bytes(m.scale_dtype);
    if (m.zeros) j.zero[n] = m.zeros + beside;
    if (!w.unpacked) continue;
    char* unpacked = w.unpacked + n * t.slab_chunks * CHUNK;
    unpack_any(m, t, s, j.panel[n], j.zero[n], unpacked);
    j.unpacked[n] = unpacked;
  }
  bool is_last = index + 1 == t.slabs;
  Ends ends;
  if (is_last) ends = ends_of(call, pair.panels, pair.count);
  for (int64_t tile = begin; tile < end; tile += 2) {
    int together = tile + 1 < end ? 2 : 1;
    for (int i = 0; i < together; ++i) {
      int64_t left = w.plan.rows - (tile + i) * t.tile_rows;
      j.rows[i] = left < 0 ? 0 : left < t.tile_rows ? left : t.tile_rows;
      j.x[i] = t.x + ((tile + i) * t.chunks + s.chunk) * CHUNK;
      j.x_scale[i] = t.scales + ((tile + i) * t.groups + s.group) * TILE_ROWS;
    }
    j.out = t.slabs > 1 ? sums + (tile - begin) * 2 * CHUNK : raw;
    j.is_first = tile == begin;
    if (pair.count == 2 && end - begin >= FETCH_TILES)
      fetch_part(j, (tile - begin) / 2, (end - begin + 1) / 2);
    multiply_pair(j, together, pair.count, m.format);
    for (int i = 0; is_last && i < together; ++i) {
      Sums of_tile{j.out + i * 2 * CHUNK, j.x_scale[i], t.offsets + (tile + i) * TILE_ROWS};
      finish_tile(call, ends, of_tile, w.plan.row_begin + (tile + i) * t.tile_rows, j.rows[i]);
    }
  }
}

void tile_multiply(const LinearPlan& plan, int thread, int64_t begin, int64_t end) {
  Work w{plan, tiled(*plan.call, plan.scratch, plan.rows), nullptr, nullptr};
  char* area = plan.thread_scratch + thread * plan.thread_bytes;
  int64_t unpacked = unpacked_bytes(*plan.call, w.t);
  w.unpacked = unpacked ? area : nullptr;
  w.sums = area + unpacked;
  TileConfig config = tile_config(int(w.t.tile_rows));
  TILE_CONFIGURE(config);
  int64_t block = w.t.slabs > 1 ? BLOCK_TILES : w.t.tiles;
  for (int64_t tile = 0; tile < w.t.tiles; tile += block) {
    int64_t tile_end = tile + block < w.t.tiles ? tile + block : w.t.tiles;
    for (int64_t slab = 0; slab < w.t.slabs; ++slab) {
      char* sums = w.sums;
      for (int64_t unit = begin; unit < end; sums += up(tile_end - tile, 2) * 2 * CHUNK) {
        Pair pair = pair_at(plan, unit, end);
        unit += plan.call->gated ? 1 : pair.count;
        multiply_slab(w, pair, pair_at(plan, unit, plan.units), slab, tile, tile_end, sums);
      }
    }
  }
  TILE_RELEASE();
}

}  // namespace

LinearVariant linear_amx(int64_t rows) {
  if (rows <= VECTOR_ROWS) return vector_variant();
  return {tiled_bytes,       tile_prepare_tasks, tile_prepare,
          tile_thread_bytes, tile_units,         tile_multiply};
}
