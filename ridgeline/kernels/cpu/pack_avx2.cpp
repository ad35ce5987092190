// How does a matrix become panels, and how are its rows read back? See linear.h for the order.
#include <cstdlib>

#include "linear.h"

namespace {


struct Packing {
  const RlPack* call;
  char* scratch;  // for each thread the rows of a panel, float or as they are
  int64_t thread_bytes;
  int failed;
};

RlMatrix matrix_of(const RlPack& c) {
  int scale_dtype = c.format == RL_W_INT8 ? RL_S_F32 : RL_S_BF16;
  return {c.codes, c.scales, c.zeros, c.outputs, c.inputs, c.format, c.group, scale_dtype, 0};
}

bool is_finite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits & 0x7f800000) != 0x7f800000;
}

int rounded(float value) {
  float shifted = value + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

int clamp(int value, int low, int high) {
  return value < low ? low : value > high ? high : value;
}

void read_row(const RlPack& c, int64_t row, float* out) {
  if (c.weight_dtype == RL_BF16) {
    const bf16* w = static_cast<const bf16*>(c.weight) + row * c.stride;
    for (int64_t i = 0; i < c.inputs; ++i) out[i] = to_float(w[i]);
  } else {
    std::memcpy(out, static_cast<const float*>(c.weight) + row * c.stride, size_t(c.inputs) * 4);
  }
}

float magnitude(const float* x, int64_t count) {
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

void pack_bf16(const RlPack& c, int64_t panel, int64_t rows, char* scratch) {
  int64_t padded = up(c.inputs, 2);
  bf16* copy = reinterpret_cast<bf16*>(scratch);
  std::memset(copy, 0, size_t(padded) * PANEL * 2);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t at = (panel * PANEL + r) * c.stride;
    if (c.weight_dtype == RL_BF16) {
      std::memcpy(copy + r * padded, static_cast<const bf16*>(c.weight) + at,
                  size_t(c.inputs) * 2);
    } else {
      const float* w = static_cast<const float*>(c.weight) + at;
      for (int64_t i = 0; i < c.inputs; ++i) copy[r * padded + i] = to_bf16(w[i]);
    }
  }
  auto* out = static_cast<uint32_t*>(c.codes) + panel * padded / 2 * PANEL;
  for (int64_t k = 0; k < padded / 2; ++k)
    for (int64_t r = 0; r < PANEL; ++r)
      std::memcpy(out + k * PANEL + r, copy + r * padded + 2 * k, 4);
}

// Codes of one row, four to a word, into lane r of the lines.
void put_row(const uint8_t* codes, int64_t words, int64_t lane, uint32_t* out) {
  for (int64_t k = 0; k < words; ++k) std::memcpy(out + k * PANEL + lane, codes + 4 * k, 4);
}

bool pack_int8_row(const RlPack& c, int64_t row, float* w, uint8_t* codes) {
  read_row(c, row, w);
  float scale = magnitude(w, c.inputs) / 127.0f;
  if (!is_finite(scale)) return false;
  scale = scale == 0.0f ? 1.0f : scale;
  for (int64_t i = 0; i < c.inputs; ++i)
    codes[i] = uint8_t(clamp(rounded(w[i] / scale), -127, 127) + 128);
  static_cast<float*>(c.scales)[row] = scale;
  return true;
}

// The number of the largest magnitude becomes -8, so that all 16 codes are of use.
float extreme(const float* w, int64_t count) {
  float most = magnitude(w, count);
  for (int64_t i = 0; i < count; ++i)
    if (w[i] == most) return most;
  return most == most ? -most : most;
}

// Where the scale of a row's first group stands; that of the next is 16 further on.
int64_t beside(const RlPack& c, int64_t row) {
  return row / PANEL * num_groups(matrix_of(c)) * PANEL + row % PANEL;
}

bool pack_int4_row(const RlPack& c, int64_t row, float* w, uint8_t* codes) {
  read_row(c, row, w);
  int64_t groups = num_groups(matrix_of(c));
  auto* scales = static_cast<bf16*>(c.scales) + beside(c, row);
  for (int64_t g = 0; g < groups; ++g) {
    int64_t begin = g * c.group, end = begin + c.group < c.inputs ? begin + c.group : c.inputs;
    float peak = extreme(w + begin, end - begin);
    bf16 stored = to_bf16(peak / -8.0f);
    float scale = to_float(stored);
    if (!is_finite(scale)) return false;
    scales[g * PANEL] = stored;
    float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = begin; i < end; ++i)
      codes[i] = uint8_t((scale == 0.0f ? 0 : clamp(rounded(w[i] / divisor), -8, 7)) + 8);
  }
  return true;
}

// The 15 steps span a group, 0 included, and a byte says which code is 0.
bool pack_span_row(const RlPack& c, int64_t row, float* w, uint8_t* codes) {
  read_row(c, row, w);
  int64_t groups = num_groups(matrix_of(c)), at = beside(c, row);
  auto* scales = static_cast<bf16*>(c.scales) + at;
  uint8_t* zeros = c.zeros + at;
  for (int64_t g = 0; g < groups; ++g) {
    int64_t begin = g * c.group, end = begin + c.group < c.inputs ? begin + c.group : c.inputs;
    if (!is_finite(magnitude(w + begin, end - begin))) return false;
    float top = 0.0f, bottom = 0.0f;
    for (int64_t i = begin; i < end; ++i) {
      top = w[i] > top ? w[i] : top;
      bottom = w[i] < bottom ? w[i] : bottom;
    }
    bf16 stored = to_bf16((top - bottom) / 15.0f);
    float scale = to_float(stored);
    if (!is_finite(scale)) return false;
    float divisor = scale == 0.0f ? 1.0f : scale;
    int zero = clamp(rounded(-bottom / divisor), 0, 15);
    scales[g * PANEL] = stored;
    zeros[g * PANEL] = uint8_t(zero);
    for (int64_t i = begin; i < end; ++i)
      codes[i] = uint8_t(clamp(rounded(w[i] / divisor) + zero, 0, 15));
  }
  return true;
}

bool pack_row(const RlPack& c, int64_t row, float* w, uint8_t* codes) {
  if (c.format == RL_W_INT8) return pack_int8_row(c, row, w, codes);
  return c.zeros ? pack_span_row(c, row, w, codes) : pack_int4_row(c, row, w, codes);
}

void put_int4_row(const uint8_t* codes, int64_t lines, int64_t lane, uint32_t* out) {
  for (int64_t k = 0; k < lines; ++k) {
    uint32_t low, high;
    std::memcpy(&low, codes + 8 * k, 4);
    std::memcpy(&high, codes + 8 * k + 4, 4);
    out[k * PANEL + lane] = low | high << 4;
  }
}

void pack_task(void* raw, int task, int thread) {
  auto* p = static_cast<Packing*>(raw);
  const RlPack& c = *p->call;
  char* scratch = p->scratch + thread * p->thread_bytes;
  int64_t left = c.outputs - int64_t(task) * PANEL, rows = left < PANEL ? left : int64_t(PANEL);
  if (c.format == RL_W_BF16) {
    pack_bf16(c, task, rows, scratch);
    return;
  }
  RlMatrix m = matrix_of(c);
  int64_t lines = panel_lines(m);
  int64_t padded = lines * line_inputs(c.format);
  auto* w = reinterpret_cast<float*>(scratch);
  auto* codes = reinterpret_cast<uint8_t*>(scratch + up(padded * 4, 64));
  auto* out = static_cast<uint32_t*>(c.codes) + task * lines * PANEL;
  int middle = c.format == RL_W_INT8 ? 128 : 8;
  std::memset(codes, middle, size_t(padded));
  for (int64_t r = 0; r < PANEL; ++r) {
    int64_t row = int64_t(task) * PANEL + r;
    if (r >= rows) {
      std::memset(codes, middle, size_t(padded));
    } else if (!pack_row(c, row, w, codes)) {
      __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
    }
    if (c.format == RL_W_INT8)
      put_row(codes, lines, r, out);
    else
      put_int4_row(codes, lines, r, out);
  }
  if (has_groups(c.format) && rows < PANEL) {
    int64_t groups = num_groups(m), first = int64_t(task) * groups * PANEL;
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t r = rows; r < PANEL; ++r) {
        static_cast<bf16*>(c.scales)[first + g * PANEL + r] = 0;
        if (c.zeros) c.zeros[first + g * PANEL + r] = 8;
      }
  }
}

struct PackingCodes {
  const RlPackCodes* call;
  char* scratch;  // of each thread, for one row
  int64_t thread_bytes;
};

// Codes of a row, two neighbours in a byte, to the order of a line; a row may end inside of one.
void order_codes(const uint8_t* given, int64_t bytes, int64_t lines, uint8_t* out) {
  for (int64_t k = 0; k < lines; ++k) {
    uint8_t b[4] = {};
    std::memcpy(b, given + 4 * k, size_t(bytes - 4 * k < 4 ? bytes - 4 * k : 4));
    out[4 * k] = uint8_t((b[0] & 15) | b[2] << 4);
    out[4 * k + 1] = uint8_t(b[0] >> 4 | (b[2] & 0xf0));
    out[4 * k + 2] = uint8_t((b[1] & 15) | b[3] << 4);
    out[4 * k + 3] = uint8_t(b[1] >> 4 | (b[3] & 0xf0));
  }
}

void pack_codes_task(void* raw, int task, int thread) {
  auto* p = static_cast<PackingCodes*>(raw);
  const RlPackCodes& c = *p->call;
  auto* row_codes = reinterpret_cast<uint8_t*>(p->scratch + thread * p->thread_bytes);
  bool bytes = has_bytes(c.format);
  int64_t numbers = line_inputs(c.format), lines = up(c.inputs, numbers) / numbers;
  int64_t row_bytes = bytes ? c.inputs : (c.inputs + 1) / 2;
  auto* out = static_cast<uint32_t*>(c.codes) + task * lines * PANEL;
  for (int64_t r = 0; r < PANEL; ++r) {
    int64_t row = int64_t(task) * PANEL + r;
    std::memset(row_codes, bytes ? 128 : 0x88, size_t(lines * 4));
    if (row < c.outputs) {
      const uint8_t* given = c.given + row * c.stride;
      if (bytes)
        std::memcpy(row_codes, given, size_t(row_bytes));
      else
        order_codes(given, row_bytes, lines, row_codes);
    }
    put_row(row_codes, lines, r, out);
  }
}

struct Gathering {
  const RlGather* call;
  int64_t first;
  bool is_share;
  int failed;
};

float code_at(const RlMatrix& m, int64_t row, int64_t k) {
  int64_t panel = row / PANEL, lane = row % PANEL, lines = panel_lines(m);
  const char* base = static_cast<const char*>(m.codes) + panel * lines * LINE + lane * 4;
  if (m.format == RL_W_BF16) {
    bf16 value;
    std::memcpy(&value, base + k / 2 * LINE + k % 2 * 2, 2);
    return to_float(value);
  }
  bool bytes = has_bytes(m.format);
  int byte = uint8_t(base[(bytes ? k / 4 : k / 8) * LINE + k % 4]);
  int code = bytes ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
  int64_t at = m.format == RL_W_INT8 ? row : (panel * num_groups(m) + k / m.group) * PANEL + lane;
  int zero = m.zeros ? m.zeros[at] : bytes ? 128 : 8;
  return float(code - zero) * load_scale(m.scales, at, m.scale_dtype);
}

void gather_task(void* raw, int task, int) {
  auto* g = static_cast<Gathering*>(raw);
  const RlGather& c = *g->call;
  const RlMatrix& m = c.matrix;
  int64_t row = c.rows ? c.rows[task] : task, at = task * c.out_stride;
  row -= g->first;
  if (row < 0 || row >= m.outputs) {
    int64_t size = c.out_dtype == RL_BF16 ? 2 : 4;
    if (g->is_share)
      std::memset(static_cast<char*>(c.out) + at * size, 0, size_t(m.inputs * size));
    else
      __atomic_store_n(&g->failed, 1, __ATOMIC_RELAXED);
    return;
  }
  if (m.format == RL_W_BF16 && c.out_dtype == RL_BF16) {
    auto* out = static_cast<bf16*>(c.out) + at;
    int64_t lines = panel_lines(m);
    const char* base = static_cast<const char*>(m.codes) + row / PANEL * lines * LINE +
                       row % PANEL * 4;
    for (int64_t k = 0; k + 1 < m.inputs; k += 2) std::memcpy(out + k, base + k / 2 * LINE, 4);
    if (m.inputs & 1) std::memcpy(out + m.inputs - 1, base + (lines - 1) * LINE, 2);
    return;
  }
  for (int64_t k = 0; k < m.inputs; ++k) {
    float value = code_at(m, row, k);
    if (c.out_dtype == RL_BF16)
      static_cast<bf16*>(c.out)[at + k] = to_bf16(value);
    else
      static_cast<float*>(c.out)[at + k] = value;
  }
}

int gather(Gathering g) {
  if (g.call->count * g.call->matrix.inputs < (1 << 14))
    for (int64_t i = 0; i < g.call->count; ++i) gather_task(&g, int(i), 0);
  else
    pool_run(int(g.call->count), gather_task, &g);
  return g.failed;
}

}  // namespace

RL_API int rl_pack(const RlPack* call) {
  Packing p{call, nullptr, 0, 0};
  int64_t padded = up(call->inputs, 8);
  p.thread_bytes = up(padded * (call->format == RL_W_BF16 ? 2 * PANEL : 5) + 128, 64);
  p.scratch = static_cast<char*>(std::aligned_alloc(64, size_t(p.thread_bytes * pool_threads())));
  if (p.scratch == nullptr) return 3;
  pool_run(int(up(call->outputs, PANEL) / PANEL), pack_task, &p);
  std::free(p.scratch);
  return p.failed;
}

RL_API int rl_pack_codes(const RlPackCodes* call) {
  PackingCodes p{call, nullptr, up(up(call->inputs, 8) + 64, 64)};
  p.scratch = static_cast<char*>(std::aligned_alloc(64, size_t(p.thread_bytes * pool_threads())));
  if (p.scratch == nullptr) return 3;
  pool_run(int(up(call->outputs, PANEL) / PANEL), pack_codes_task, &p);
  std::free(p.scratch);
  return 0;
}

RL_API int rl_gather(const RlGather* call) { return gather({call, 0, false, 0}); }

RL_API int rl_gather_share(const RlGatherShare* call) {
  return gather({&call->all, call->first, true, 0});
}
