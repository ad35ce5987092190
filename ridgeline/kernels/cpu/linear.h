// What is a packed matrix, and what does one call of a linear layer want?
//
// y[M, N] = x[M, K] W[N, K]^T. W is packed once, in panels of 16 rows (the last one filled up with
// zeros); a panel is a run of lines of 64 bytes, 4 bytes for each of its 16 rows:
//   bf16: 2 neighbours of a row;  8 bits: 4 neighbours, each as its code (value + 128);  4 bits: 8
//   neighbours, of which the low halves of the bytes hold the first 4 and the high halves the rest,
//   as their codes (value + 8).
// K is filled up to 2, 4 or 8. This is the order of AVX-512 dot products and of the second operand
// of AMX, so one copy serves every variant and every M.
// Scales: int8 one a row; of groups one a row and group, [panels][groups][16], where the last group
// may be short: bfloat16 of int4, of any dtype else. Zero points of groups, if there are some, are
// bytes in the same order: a weight is (code - zero) * scale.
#pragma once

#include "dtype.h"
#include "pool.h"

enum RlFormat : int {
  RL_W_BF16 = 0,
  RL_W_INT8 = 1,
  RL_W_INT4 = 2,
  RL_W_GROUPS4 = 3,
  RL_W_GROUPS8 = 4
};

// Of scales alone; float16 is in no other place.
enum RlScale : int { RL_S_F32 = 0, RL_S_BF16 = 1, RL_S_F16 = 2 };

// y is act(first half of the outputs) * second half; the clamped one is that of gpt-oss, see
// clamped_mul in silu_mul.py.
enum RlGate : int { RL_NO_GATE = 0, RL_SILU = 1, RL_CLAMPED = 2 };

enum : int { PANEL = 16, LINE = 64 };

struct RlMatrix {
  const void* codes;
  const void* scales;      // null for bf16
  const uint8_t* zeros;    // of 4 bits in groups, or null
  int64_t outputs, inputs;
  int32_t format, group;   // group: a multiple of 8, up to 512; 0 for bf16 and int8
  int32_t scale_dtype;
  int32_t has_lowest;      // int8: some codes are 0, that is -128, which rounding here never makes
};

struct RlLinear {
  RlMatrix matrix;
  const void* x;
  void* y;                 // may be residual
  const void* bias;        // [N] or null
  const void* residual;    // [M, O] or null
  int64_t rows, x_stride, y_stride, residual_stride;
  int32_t x_dtype, y_dtype, bias_dtype, residual_dtype;
  int32_t gated;           // an RlGate; N % 32 == 0 but for RL_NO_GATE
  int32_t unused;
  const int32_t* x_rows;   // where row m of x is, or null: in order
  const int32_t* y_rows;   // where it goes in y and the residual is, or null
  const float* row_weights;  // what y is multiplied by before the residual is added, or null
};

struct RlPack {
  const void* weight;      // [N, K]
  void* codes;             // for bf16 it may be `weight` if N % 16 == 0 and K % 2 == 0
  void* scales;            // float32 of int8, else bfloat16
  uint8_t* zeros;          // of 4 bits in groups: the span of a group is rounded, not the largest
  int64_t outputs, inputs, stride;
  int32_t weight_dtype, format, group, unused;
};

struct RlPackCodes {
  const uint8_t* given;    // [N] rows of K codes, of 4 bits two a byte, the even one low
  void* codes;
  int64_t outputs, inputs, stride;  // stride in bytes
  int32_t format, unused;
};

struct RlGather {
  RlMatrix matrix;
  const int64_t* rows;     // null: 0 .. count - 1
  void* out;               // [count, K]
  int64_t count, out_stride;
  int32_t out_dtype, unused;
};

// The same of the rows from `first` on, of a matrix that several ranks divide; others are zeros.
struct RlGatherShare {
  RlGather all;
  int64_t first;
};

RL_API int rl_linear(const RlLinear* call);
// 0, or 1 if a weight is not finite (not of bf16). There is no rounding to groups of 8 bits.
RL_API int rl_pack(const RlPack* call);
// Codes as they are, in the order of panels; scales and zero points are the caller's.
RL_API int rl_pack_codes(const RlPackCodes* call);
// Rows of the matrix that rl_linear multiplies by; 1 if a row number is out of range.
RL_API int rl_gather(const RlGather* call);
RL_API int rl_gather_share(const RlGatherShare* call);

namespace {

[[maybe_unused]] inline int64_t up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

[[maybe_unused]] inline bool has_groups(int format) { return format >= RL_W_INT4; }

// Codes of 8 bits.
[[maybe_unused]] inline bool has_bytes(int format) {
  return format == RL_W_INT8 || format == RL_W_GROUPS8;
}

[[maybe_unused]] inline int64_t line_inputs(int format) {
  return format == RL_W_BF16 ? 2 : has_bytes(format) ? 4 : 8;
}

[[maybe_unused]] inline int64_t panel_lines(const RlMatrix& m) {
  return up(m.inputs, line_inputs(m.format)) / line_inputs(m.format);
}

[[maybe_unused]] inline int64_t row_in(const int32_t* rows, int64_t row) {
  return rows ? rows[row] : row;
}

constexpr float CLAMP = 7.0f, STEEPNESS = 1.702f;
constexpr int64_t ALONE_NUMBERS = 1 << 14;  // of x: fewer are prepared by the caller alone
constexpr int64_t TASK_BYTES = 96 << 10;  // of weights in a task, when rows are few

// Of `units`, when a task should have `panels` and each thread several tasks.
[[maybe_unused]] inline int64_t share(const RlLinear& call, int64_t units, int64_t panels,
                                      int64_t tasks_a_thread) {
  int64_t most = panels / (call.gated ? 2 : 1);
  int64_t by_threads = units / (tasks_a_thread * pool_threads());
  int64_t wanted = most < by_threads ? most : by_threads;
  if (!call.gated) wanted &= ~int64_t(1);  // panels are taken in pairs
  return wanted < 1 ? (call.gated || units <= pool_threads() ? 1 : 2) : wanted;
}

// While memory is the limit: so many bytes of weights in a task.
[[maybe_unused]] inline int64_t few_rows_units(const RlLinear& call, int64_t units) {
  return share(call, units, TASK_BYTES / (panel_lines(call.matrix) * LINE), 8);
}

[[maybe_unused]] inline int64_t num_groups(const RlMatrix& m) {
  return has_groups(m.format) ? (m.inputs + m.group - 1) / m.group : 0;
}

[[maybe_unused]] inline int64_t scale_bytes(int dtype) { return dtype == RL_S_F32 ? 4 : 2; }

[[maybe_unused]] inline float half_to_float(uint16_t half) {
  uint32_t size = half & 0x7fff, bits;
  float result = float(size) * 0x1p-24f;  // below the least normal number
  if (size >= 0x400) {
    bits = (size << 13) + ((size >= 0x7c00 ? 224u : 112u) << 23);
    std::memcpy(&result, &bits, 4);
  }
  return half & 0x8000 ? -result : result;
}

[[maybe_unused]] inline float load_scale(const void* scales, int64_t index, int dtype) {
  if (dtype == RL_S_F32) return static_cast<const float*>(scales)[index];
  uint16_t half = static_cast<const uint16_t*>(scales)[index];
  return dtype == RL_S_BF16 ? to_float(half) : half_to_float(half);
}

}  // namespace

// What a variant does: prepares rows of x, then multiplies some panels by all of them.
struct LinearPlan {
  const RlLinear* call;
  char* scratch;      // prepared x
  char* thread_scratch;
  int64_t thread_bytes;  // of it for each thread
  int64_t row_begin, rows;  // of x in this pass
  int64_t units;      // of work: panels, or pairs of a gate's and an up panel
  int64_t units_a_task;
};

struct LinearVariant {
  int64_t (*scratch_bytes)(const RlLinear& call, int64_t rows);
  int (*prepare_tasks)(const LinearPlan& plan);
  void (*prepare)(const LinearPlan& plan, int task);
  int64_t (*thread_bytes)(const RlLinear& call, int64_t rows);
  int64_t (*task_units)(const RlLinear& call, int64_t rows, int64_t units);
  void (*multiply)(const LinearPlan& plan, int thread, int64_t begin, int64_t end);
};

LinearVariant linear_variant(int64_t rows);  // of the level in use
LinearVariant linear_avx2();
LinearVariant linear_avx512();
LinearVariant linear_bf16();
LinearVariant linear_amx(int64_t rows);
