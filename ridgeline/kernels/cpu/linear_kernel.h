// How is a product computed with vectors? Shared by the variants; each brings its `Ops` first:
//   Acc (16 int32 or 16 float32), Line (64 bytes of a panel), the dot steps, MAX1 / MAX2 rows with
//   one / two panels at once, Pair (how two neighbours of x are kept); for few rows of bfloat16
//   CHAINS sums of each output, FEW1 / FEW2 rows, and FEW_PAIRED for which two panels are faster.
// Rows of x are prepared in blocks: unit k of all rows of a block stands together.
//
// The numbers of a row do not depend on how many rows there are, up to FEW_ROWS: whole numbers have
// no order, and those of bfloat16 are added up in the same CHAINS. So a token has the same logits
// alone and among drafts that are checked together. More rows of bfloat16 have fewer chains each.
#pragma once

#include "linear.h"

namespace {

struct Blocks {
  int64_t count, rows;
  int64_t begin(int64_t b) const { return b * rows / count; }
  int64_t size(int64_t b) const { return begin(b + 1) - begin(b); }
};

constexpr int64_t FEW_ROWS = 7;

inline bool has_chains(const RlLinear& call, int64_t rows) {
  return call.matrix.format == RL_W_BF16 && rows <= FEW_ROWS;
}

// One panel at once while all rows fit one block: each line is then read once. Else two; and for
// rows of bfloat16 whose chains alone are too few to hide how long a step takes.
inline bool two_panels(const RlLinear& call, int64_t rows) {
  if (call.gated) return true;
  return has_chains(call, rows) ? rows <= Ops::FEW_PAIRED : rows > Ops::MAX1;
}

inline Blocks blocks_of(const RlLinear& call, int64_t rows) {
  int64_t most = two_panels(call, rows) ? Ops::MAX2 : Ops::MAX1;
  if (has_chains(call, rows)) most = Ops::FEW1;
  return {(rows + most - 1) / most, rows};
}

struct Prepared {  // where things are in the scratch
  int64_t unit_bytes, units;  // units of one row
  char* x;
  float* scales;              // int8: [rows]; groups: blocks of [groups][rows of the block]
  int32_t* offsets;           // as scales: the sum of the codes * -128 (int8), * -8 (int4) or * -1
};

inline Prepared prepared(const RlLinear& call, char* scratch, int64_t rows) {
  const RlMatrix& m = call.matrix;
  Prepared p{};
  bool is_bf16 = m.format == RL_W_BF16;
  p.unit_bytes = is_bf16 ? int64_t(sizeof(Ops::Pair)) : 4;
  p.units = panel_lines(m) * (line_inputs(m.format) == 8 ? 2 : 1);
  p.x = scratch;
  int64_t groups = has_groups(m.format) ? num_groups(m) : 1;
  char* behind = scratch + up(p.unit_bytes * p.units * rows, 64);
  p.scales = reinterpret_cast<float*>(behind);
  p.offsets = reinterpret_cast<int32_t*>(behind + up(4 * groups * rows, 64));
  return p;
}

int64_t scratch_bytes(const RlLinear& call, int64_t rows) {
  Prepared p = prepared(call, nullptr, rows);
  int64_t groups = has_groups(call.matrix.format) ? num_groups(call.matrix) : 1;
  return up(p.unit_bytes * p.units * rows, 64) + 2 * up(4 * groups * rows, 64) + 64;
}

int prepare_tasks(const LinearPlan& plan) { return int(plan.rows); }

// ---- preparing x ---------------------------------------------------------------------------

constexpr int64_t PIECE = 512;  // numbers of a row at once

inline void load_floats(const RlLinear& call, int64_t row, int64_t begin, int64_t count,
                        float* out) {
  int64_t at = row_in(call.x_rows, row) * call.x_stride + begin;
  if (call.x_dtype == RL_BF16) {
    const bf16* x = static_cast<const bf16*>(call.x) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]);
  } else {
    std::memcpy(out, static_cast<const float*>(call.x) + at, size_t(count) * 4);
  }
}

// The largest magnitude; NaN if there is one: as bits it is larger than infinity.
inline float magnitude(const float* x, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float result;
  std::memcpy(&result, &most, 4);
  return result;
}

// Nearest integers, ties to even, of numbers within +-127; returns their sum.
inline int32_t round_codes(const float* x, int64_t count, float inverse, int8_t* out) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the last bits of the sum are the integer
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    float shifted = x[i] * inverse + MAGIC;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    int32_t code = bits - 0x4b400000;
    code = code > 127 ? 127 : code < -127 ? -127 : code;
    out[i] = int8_t(code);
    sum += code;
  }
  return sum;
}

inline float inverse_of(float most) { return most > 0 ? 127.0f / most : 0.0f; }

inline void scatter4(const int8_t* codes, int64_t units, int64_t stride, uint32_t* out) {
  for (int64_t k = 0; k < units; ++k) {
    uint32_t unit;
    std::memcpy(&unit, codes + 4 * k, 4);
    out[k * stride] = unit;
  }
}

inline void prepare_pairs(const RlLinear& call, int64_t row, int64_t stride, Ops::Pair* out) {
  float piece[PIECE];
  int64_t inputs = call.matrix.inputs;
  for (int64_t begin = 0; begin < inputs; begin += PIECE) {
    int64_t count = inputs - begin < PIECE ? inputs - begin : PIECE;
    load_floats(call, row, begin, count, piece);
    if (count & 1) piece[count] = 0.0f;
    for (int64_t i = 0; i < (count + 1) / 2; ++i)
      out[(begin / 2 + i) * stride] = Ops::pair(piece[2 * i], piece[2 * i + 1]);
  }
}

inline float row_magnitude(const RlLinear& call, int64_t row, float* piece) {
  int64_t inputs = call.matrix.inputs;
  float most = 0.0f;
  for (int64_t begin = 0; begin < inputs; begin += PIECE) {
    int64_t count = inputs - begin < PIECE ? inputs - begin : PIECE;
    load_floats(call, row, begin, count, piece);
    float here = magnitude(piece, count);
    if (!(here <= most)) most = here;
    if (most != most) break;  // NaN stays
  }
  return most;
}

inline void prepare_int8(const RlLinear& call, int64_t row, int64_t stride, uint32_t* out,
                         float* scale, int32_t* offset) {
  float piece[PIECE];
  int8_t codes[PIECE];
  int64_t inputs = call.matrix.inputs;
  float most = row_magnitude(call, row, piece);
  *scale = most / 127.0f;
  float inverse = inverse_of(most);
  int32_t sum = 0;
  for (int64_t begin = 0; begin < inputs; begin += PIECE) {
    int64_t count = inputs - begin < PIECE ? inputs - begin : PIECE;
    load_floats(call, row, begin, count, piece);
    for (int64_t i = count; i < up(count, 4); ++i) piece[i] = 0.0f;
    sum += round_codes(piece, up(count, 4), inverse, codes);
    scatter4(codes, up(count, 4) / 4, stride, out + begin / 4 * stride);
  }
  *offset = -128 * sum;
}

inline void prepare_groups(const RlLinear& call, int64_t row, int64_t stride, uint32_t* out,
                           float* scales, int32_t* offsets) {
  float piece[PIECE];
  int8_t codes[PIECE];
  int64_t inputs = call.matrix.inputs, group = call.matrix.group;
  int64_t step = line_inputs(call.matrix.format);
  int32_t factor = call.matrix.format == RL_W_INT4 ? -8 : -1;
  for (int64_t begin = 0, g = 0; begin < inputs; begin += group, ++g) {
    int64_t count = inputs - begin < group ? inputs - begin : group, padded = up(count, step);
    load_floats(call, row, begin, count, piece);
    for (int64_t i = count; i < padded; ++i) piece[i] = 0.0f;
    float most = magnitude(piece, count);
    scales[g * stride] = most / 127.0f;
    offsets[g * stride] = factor * round_codes(piece, padded, inverse_of(most), codes);
    scatter4(codes, padded / 4, stride, out + begin / 4 * stride);
  }
}

void prepare(const LinearPlan& plan, int task) {
  const RlLinear& call = *plan.call;
  Prepared p = prepared(call, plan.scratch, plan.rows);
  Blocks blocks = blocks_of(call, plan.rows);
  int64_t b = int64_t(task) * blocks.count / plan.rows;
  while (blocks.begin(b + 1) <= task) ++b;
  int64_t first = blocks.begin(b), stride = blocks.size(b), inside = task - first;
  char* out = p.x + (first * p.units + inside) * p.unit_bytes;
  int64_t row = plan.row_begin + task, at = first * num_groups(call.matrix) + inside;
  if (call.matrix.format == RL_W_BF16)
    prepare_pairs(call, row, stride, reinterpret_cast<Ops::Pair*>(out));
  else if (call.matrix.format == RL_W_INT8)
    prepare_int8(call, row, stride, reinterpret_cast<uint32_t*>(out), p.scales + task,
                 p.offsets + task);
  else
    prepare_groups(call, row, stride, reinterpret_cast<uint32_t*>(out), p.scales + at,
                   p.offsets + at);
}

// ---- multiplying ---------------------------------------------------------------------------

struct Tile {  // one block of x and one or two panels
  const char* panel[2];
  const void* scale[2];  // of the panel's groups
  const uint8_t* zero[2];  // of the same, or null: then `middle`
  int scale_dtype;
  int32_t middle;
  const char* x;
  const float* x_scale;
  const int32_t* x_offset;
  int64_t lines, group_lines;
  float* out;  // [panels][rows][16], as float or as int32 bits
};

constexpr int64_t AHEAD = 2048;  // bytes that a panel is fetched ahead

inline void fetch(const char* at) { __builtin_prefetch(at + AHEAD, 0, 3); }

template <int MB, int NB>
constexpr int unroll() {  // independent chains: a dot product takes several cycles
  return MB * NB >= 8 ? 1 : MB * NB >= 4 ? 2 : MB * NB >= 2 ? 4 : 8;
}

template <class Step, int MB, int NB, int KU>
inline void dot_lines(const Tile& t, int64_t begin, int64_t end, const typename Step::X* x,
                      typename Step::Acc (&total)[NB][MB]) {
  typename Step::Acc acc[KU][NB][MB];
  for (int u = 0; u < KU; ++u)
    for (int n = 0; n < NB; ++n)
      for (int m = 0; m < MB; ++m) acc[u][n][m] = u ? Step::zero() : total[n][m];
  int64_t k = begin;
  for (; k + KU <= end; k += KU) {
#pragma GCC unroll 8
    for (int u = 0; u < KU; ++u) {
#pragma GCC unroll 2
      for (int n = 0; n < NB; ++n) {
        const char* line = t.panel[n] + (k + u) * LINE;
        fetch(line);
        auto w = Step::load(line);
#pragma GCC unroll 16
        for (int m = 0; m < MB; ++m)
          acc[u][n][m] = Step::dot(acc[u][n][m], w, x + Step::UNITS * (k + u) * MB + m, MB);
      }
    }
  }
  for (; k < end; ++k)
    for (int n = 0; n < NB; ++n) {
      auto w = Step::load(t.panel[n] + k * LINE);
#pragma GCC unroll 16
      for (int m = 0; m < MB; ++m)
        acc[0][n][m] = Step::dot(acc[0][n][m], w, x + Step::UNITS * k * MB + m, MB);
    }
#pragma GCC unroll 16
  for (int m = 0; m < MB; ++m)
    for (int n = 0; n < NB; ++n) {
      auto sum = acc[0][n][m];
      for (int u = 1; u < KU; ++u) sum = Step::add(sum, acc[u][n][m]);
      total[n][m] = sum;
    }
}

template <class Step, int MB, int NB, int KU>
void whole(const Tile& t) {
  typename Step::Acc total[NB][MB];
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < MB; ++m) total[n][m] = Step::zero();
  dot_lines<Step, MB, NB, KU>(t, 0, t.lines, reinterpret_cast<const typename Step::X*>(t.x),
                              total);
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < MB; ++m) Step::store(t.out + (n * MB + m) * PANEL, total[n][m]);
}

template <int MB, int NB>
void grouped(const Tile& t) {
  using Step = Ops::Int4;
  for (int i = 0; i < NB * MB; ++i) Ops::store(t.out + i * PANEL, Ops::zero());
  for (int64_t begin = 0, g = 0; begin < t.lines; begin += t.group_lines, ++g) {
    int64_t end = begin + t.group_lines < t.lines ? begin + t.group_lines : t.lines;
    typename Step::Acc total[NB][MB];
#pragma GCC unroll 16
    for (int m = 0; m < MB; ++m)
      for (int n = 0; n < NB; ++n) total[n][m] = Step::all(t.x_offset[g * MB + m]);
    constexpr int KU = MB * NB >= 6 ? 1 : MB * NB >= 3 ? 2 : 4;
    dot_lines<Step, MB, NB, KU>(t, begin, end, reinterpret_cast<const uint32_t*>(t.x), total);
    for (int n = 0; n < NB; ++n) {
      auto scale = Ops::load_bf16(static_cast<const bf16*>(t.scale[n]) + g * PANEL);
#pragma GCC unroll 16
      for (int m = 0; m < MB; ++m)
        Ops::accumulate(t.out + (n * MB + m) * PANEL, total[n][m], scale, t.x_scale[g * MB + m]);
    }
  }
}

// Groups with scales of any dtype, with zero points or with the middle of the codes. Apart from
// `grouped`, whose groups have nothing to choose.
template <class Step, int MB, int NB>
void grouped_any(const Tile& t) {
  for (int i = 0; i < NB * MB; ++i) Ops::store(t.out + i * PANEL, Ops::zero());
  for (int64_t begin = 0, g = 0; begin < t.lines; begin += t.group_lines, ++g) {
    int64_t end = begin + t.group_lines < t.lines ? begin + t.group_lines : t.lines;
    typename Step::Acc total[NB][MB];
    for (int n = 0; n < NB; ++n) {
      auto zero = t.zero[n] ? Ops::load_zeros(t.zero[n] + g * PANEL) : Step::all(t.middle);
#pragma GCC unroll 16
      for (int m = 0; m < MB; ++m) total[n][m] = Ops::times(zero, t.x_offset[g * MB + m]);
    }
    constexpr int KU = MB * NB >= 6 ? 1 : MB * NB >= 3 ? 2 : 4;
    dot_lines<Step, MB, NB, KU>(t, begin, end, reinterpret_cast<const uint32_t*>(t.x), total);
    for (int n = 0; n < NB; ++n) {
      auto scale = Ops::load_scales(t.scale[n], g * PANEL, t.scale_dtype);
#pragma GCC unroll 16
      for (int m = 0; m < MB; ++m)
        Ops::accumulate(t.out + (n * MB + m) * PANEL, total[n][m], scale, t.x_scale[g * MB + m]);
    }
  }
}

using Kernel = void (*)(const Tile&);

template <int NB, int... MB>
struct Kernels {
  static constexpr Kernel bf16s[] = {whole<Ops::Bf16, MB, NB, unroll<MB, NB>()>...};
  static constexpr Kernel int8s[] = {whole<Ops::Int8, MB, NB, unroll<MB, NB>()>...};
  static constexpr Kernel int8_alls[] = {whole<Ops::Int8All, MB, NB, unroll<MB, NB>()>...};
  static constexpr Kernel int4s[] = {grouped<MB, NB>...};
  static constexpr Kernel groups4s[] = {grouped_any<Ops::Int4, MB, NB>...};
  static constexpr Kernel groups8s[] = {grouped_any<Ops::Int8All, MB, NB>...};
  static Kernel find(const RlMatrix& m, int64_t rows) {
    switch (m.format) {
      case RL_W_BF16: return bf16s[rows - 1];
      case RL_W_INT8: return (m.has_lowest ? int8_alls : int8s)[rows - 1];
      case RL_W_INT4: return int4s[rows - 1];
      case RL_W_GROUPS4: return groups4s[rows - 1];
      default: return groups8s[rows - 1];
    }
  }
};

template <int NB, int... MB>
struct FewKernels {
  static constexpr Kernel all[] = {whole<Ops::Bf16, MB, NB, Ops::CHAINS>...};
};

template <template <int, int...> class Of, int NB, class Sequence>
struct Counted;
template <int... I>
struct Numbers {};
template <int N, int... I>
struct Count : Count<N - 1, N, I...> {};
template <int... I>
struct Count<0, I...> {
  using type = Numbers<I...>;
};
template <template <int, int...> class Of, int NB, int... I>
struct Counted<Of, NB, Numbers<I...>> : Of<NB, I...> {};
using One = Counted<Kernels, 1, Count<Ops::MAX1>::type>;
using Two = Counted<Kernels, 2, Count<Ops::MAX2>::type>;
using FewOne = Counted<FewKernels, 1, Count<Ops::FEW1>::type>;
using FewTwo = Counted<FewKernels, 2, Count<Ops::FEW2>::type>;

// Few rows of bfloat16 by one or two panels, one behind the other if both do not fit the registers.
inline void multiply_few(Tile& t, int num_panels, int64_t rows) {
  if (num_panels == 1) return FewOne::all[rows - 1](t);
  if (Ops::FEW2 >= Ops::FEW1 || rows <= Ops::FEW2) return FewTwo::all[rows - 1](t);
  const char* first = t.panel[0];
  FewOne::all[rows - 1](t);
  t.panel[0] = t.panel[1], t.out += rows * PANEL;
  FewOne::all[rows - 1](t);
  t.panel[0] = first, t.out -= rows * PANEL;
}

constexpr int larger_of(int a, int b) { return a > b ? a : b; }
constexpr int MOST_SUMS = larger_of(larger_of(Ops::MAX1, 2 * Ops::MAX2), 2 * Ops::FEW1);

// ---- what stands behind the product ----------------------------------------------------------

// e^x for x <= 0 or so, within 2 ulp; the result is 0 below -87.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float shifted = x * 1.44269504f + 12582912.0f;
  float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t power = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return p * scale;
}

struct Ready {  // what belongs to a panel's outputs, whole vectors of it
  float bias[PANEL], scale[PANEL];
};

inline void make_ready(const RlLinear& call, int64_t panel, Ready* r) {
  const RlMatrix& m = call.matrix;
  for (int64_t j = 0; j < PANEL; ++j) {
    int64_t n = panel * PANEL + j, safe = n < m.outputs ? n : m.outputs - 1;
    r->bias[j] = call.bias ? load_number(call.bias, safe, call.bias_dtype) : 0.0f;
    r->scale[j] = m.format == RL_W_INT8 ? load_scale(m.scales, safe, m.scale_dtype) : 1.0f;
  }
}

inline void finish_panel(const RlLinear& call, const Ready& r, float x_scale, int32_t offset,
                         const float* raw, float* out) {
  if (call.matrix.format == RL_W_INT8) {
    for (int64_t j = 0; j < PANEL; ++j) {
      int32_t dot;
      std::memcpy(&dot, raw + j, 4);
      out[j] = float(dot + offset) * (r.scale[j] * x_scale) + r.bias[j];
    }
    return;
  }
  for (int64_t j = 0; j < PANEL; ++j) out[j] = raw[j] + r.bias[j];
}

inline void store_row(const RlLinear& call, int64_t row, int64_t column, int64_t count,
                      const float* values) {
  float sum[PANEL];
  std::memcpy(sum, values, sizeof(sum));
  if (call.row_weights)
    for (int64_t j = 0; j < PANEL; ++j) sum[j] *= call.row_weights[row];
  row = row_in(call.y_rows, row);
  if (call.residual) {
    int64_t at = row * call.residual_stride + column;
    for (int64_t j = 0; j < count; ++j)
      sum[j] += load_number(call.residual, at + j, call.residual_dtype);
  }
  int64_t at = row * call.y_stride + column;
  if (call.y_dtype == RL_F32) {
    std::memcpy(static_cast<float*>(call.y) + at, sum, size_t(count) * 4);
    return;
  }
  bf16 rounded[PANEL];
  for (int64_t j = 0; j < PANEL; ++j) rounded[j] = to_bf16(sum[j]);
  std::memcpy(static_cast<bf16*>(call.y) + at, rounded, size_t(count) * 2);
}

inline int64_t width(const RlLinear& call, int64_t panel) {
  int64_t left = call.matrix.outputs - panel * PANEL;
  return left < PANEL ? left : int64_t(PANEL);
}

inline void clamp_both(float* gate, float* up) {
  for (int64_t j = 0; j < PANEL; ++j) {
    gate[j] = gate[j] > CLAMP ? CLAMP : gate[j];
    up[j] = (up[j] > CLAMP ? CLAMP : up[j] < -CLAMP ? -CLAMP : up[j]) + 1.0f;
  }
}

// `raw` is [panels][raw_rows][16], of which the first `rows` count; x_scales and offsets (those of
// codes + 128) belong to int8 layers.
void finish_block(const RlLinear& call, int64_t first_row, int64_t rows, const int64_t* panels,
                  int num_panels, const float* x_scales, const int32_t* offsets, const float* raw,
                  int64_t raw_rows) {
  Ready ready[2];
  for (int n = 0; n < num_panels; ++n) make_ready(call, panels[n], &ready[n]);
  for (int64_t m = 0; m < rows; ++m) {
    alignas(64) float y[2][PANEL];
    bool is_int8 = call.matrix.format == RL_W_INT8;
    float x_scale = is_int8 ? x_scales[m] : 1.0f;
    int32_t offset = is_int8 && Ops::BIASED8 ? offsets[m] : 0;
    for (int n = 0; n < num_panels; ++n)
      finish_panel(call, ready[n], x_scale, offset, raw + (n * raw_rows + m) * PANEL,
                   y[n]);
    if (call.gated) {
      if (call.gated == RL_CLAMPED) clamp_both(y[0], y[1]);
      float steepness = call.gated == RL_CLAMPED ? STEEPNESS : 1.0f;
      for (int64_t j = 0; j < PANEL; ++j)
        y[0][j] = y[0][j] / (1.0f + exponential(-steepness * y[0][j])) * y[1][j];
      store_row(call, first_row + m, panels[0] * PANEL, PANEL, y[0]);
      continue;
    }
    for (int n = 0; n < num_panels; ++n)
      store_row(call, first_row + m, panels[n] * PANEL, width(call, panels[n]), y[n]);
  }
}

void multiply_some(const LinearPlan& plan, const int64_t* panels, int num_panels) {
  const RlLinear& call = *plan.call;
  const RlMatrix& m = call.matrix;
  Prepared p = prepared(call, plan.scratch, plan.rows);
  Blocks blocks = blocks_of(call, plan.rows);
  alignas(64) float raw[MOST_SUMS * PANEL];
  Tile t{};
  t.lines = panel_lines(m);
  t.group_lines = m.group / line_inputs(m.format);
  t.scale_dtype = m.scale_dtype;
  t.middle = !has_bytes(m.format) ? 8 : Ops::BIASED8 ? 128 : 0;
  t.out = raw;
  int64_t groups = num_groups(m);
  for (int n = 0; n < num_panels; ++n) {
    t.panel[n] = static_cast<const char*>(m.codes) + panels[n] * t.lines * LINE;
    if (!groups) continue;
    int64_t at = panels[n] * groups * PANEL;
    t.scale[n] = static_cast<const char*>(m.scales) + at * scale_bytes(m.scale_dtype);
    if (m.zeros) t.zero[n] = m.zeros + at;
  }
  for (int64_t b = 0; b < blocks.count; ++b) {
    int64_t first = blocks.begin(b), rows = blocks.size(b);
    t.x = p.x + first * p.units * p.unit_bytes;
    t.x_scale = p.scales + first * groups;
    t.x_offset = p.offsets + first * groups;
    if (has_chains(call, plan.rows))
      multiply_few(t, num_panels, rows);
    else
      (num_panels == 2 ? Two::find(m, rows) : One::find(m, rows))(t);
    finish_block(call, plan.row_begin + first, rows, panels, num_panels, p.scales + first,
                 p.offsets + first, raw, rows);
  }
}

void multiply(const LinearPlan& plan, int, int64_t begin, int64_t end) {
  bool pairs = two_panels(*plan.call, plan.rows);
  for (int64_t unit = begin; unit < end;) {
    int64_t panels[2] = {unit, plan.call->gated ? unit + plan.units : unit + 1};
    bool both = plan.call->gated || (pairs && unit + 1 < end);
    multiply_some(plan, panels, both ? 2 : 1);
    unit += both && !plan.call->gated ? 2 : 1;
  }
}

int64_t no_thread_bytes(const RlLinear&, int64_t) { return 0; }

int64_t vector_units(const RlLinear& call, int64_t, int64_t units) {
  return few_rows_units(call, units);
}

[[maybe_unused]] LinearVariant vector_variant() {
  return {scratch_bytes, prepare_tasks, prepare, no_thread_bytes, vector_units, multiply};
}

}  // namespace
