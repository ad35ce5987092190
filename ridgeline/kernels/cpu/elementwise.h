// Which small kernels stand between the products of a decode step? Their arguments.
//
// All fields are 8 bytes; strides count numbers, dtypes are those of dtype.h. The other side is
// elementwise.py. Letters: T tokens, E hidden, D head size.
#pragma once

#include <cstdint>

#include "pool.h"

// sum += delta (null: nothing); out = sum / rms(sum) * weight.
struct NormArgs {
  const void* delta;
  void* sum;
  const void* weight;
  void* out;
  int64_t rows, size, delta_stride, sum_stride, out_stride, dtype;
  double eps;
};

// out = silu(gate) * up; a row of gate_up is both.
struct GateArgs {
  const void* gate_up;
  void* out;
  int64_t rows, size, gate_up_stride, out_stride, dtype;
};

// Norms (null weights: none) and rotation of q and k in place, and the write to the cache as
// `kv_dtype`: the dtype itself, RL_E4M3, or codes of 8 or 4 bits with a scale (float16) for each
// head, and with a low if they have 4. Of those keys are turned by Hadamard's matrix, and queries
// are not.
struct RotateArgs {
  void* qkv;
  const float* table;  // [positions, 2, D]: cosines, signed sines
  const int64_t* positions;
  const int64_t* slots;  // negative: not written
  void* k;
  void* v;
  const void* q_weight;
  const void* k_weight;
  uint16_t* k_scales;
  uint16_t* v_scales;
  uint16_t* k_lows;
  uint16_t* v_lows;
  int64_t rows, stride, heads, kv_heads, head_dim;
  int64_t block_size, block_stride, slot_stride, head_stride, dtype;
  int64_t scale_block_stride, scale_slot_stride, scale_head_stride, kv_dtype;
  double eps;
};

// One token for each row of logits: the largest; with keys a draw (see kernels.noise). Of equals
// the lowest. is_sound is 0 where the largest is not finite or there is a NaN, and the id 0.
struct DrawArgs {
  const void* logits;
  const int64_t* positions;
  const int64_t* keys;
  const float* temperatures;
  const float* noisy;
  int64_t* ids;
  uint8_t* is_sound;
  int64_t rows, size, stride, dtype;
};

// What a step begins with; see kernels.step_inputs.
struct InputsArgs {
  const int64_t* sent;
  const int64_t* last_ids;
  int32_t* tables;
  int64_t* token_ids;
  int64_t* positions;
  int64_t* next_positions;
  int32_t* seq_lens;
  int64_t* slots;
  int64_t rows, groups, sent_stride, group_stride, table_stride, slots_stride, block_size;
};

// last_ids[places[i]] = ids[i]; out[i] = ids[i], or -1 if it is not sound.
struct RememberArgs {
  const int64_t* ids;
  const uint8_t* is_sound;
  const int64_t* places;
  int64_t* last_ids;
  int64_t* out;
  int64_t rows;
};

// The odds of a row of logits: e^((logit - level) / temperature) * scale.
struct Odds {
  const void* logits;
  int64_t dtype;
  float temperature, level, scale;
};

struct ElementwiseVariant {
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*gate)(const GateArgs&, int64_t begin, int64_t end);
  void (*turn)(const RotateArgs&, int64_t begin, int64_t end);
  // The largest number of [begin, end) of a row, and where; NaN if there is one.
  void (*largest)(const DrawArgs&, int64_t row, int64_t begin, int64_t end, float* score,
                  int64_t* at);
  // The best after temperature and noise, `level` taken off each first.
  void (*draw)(const DrawArgs&, int64_t row, int64_t begin, int64_t end, float level, float* score,
               int64_t* at);
  // The largest logit of [begin, end), NaN if there is one, and the sum of the others' odds to it.
  void (*mass)(const Odds&, int64_t begin, int64_t end, float* most, float* sum);
  // A draw from what of p is more than q, by the noise that starts there; -inf if there is nothing.
  void (*rest)(const Odds& p, const Odds& q, uint64_t start, int64_t begin, int64_t end,
               float* score, int64_t* at);
};

const ElementwiseVariant* elementwise_avx2();
const ElementwiseVariant* elementwise_avx512();
const ElementwiseVariant* elementwise_variant();

// Of one row.
void draw_row(const DrawArgs& args, int64_t row);

constexpr int64_t MAX_HEAD_DIM = 1024;
