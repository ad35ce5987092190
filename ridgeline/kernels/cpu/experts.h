// What does one call for all experts of a layer want, and what does one for their router?
//
// Letters: T tokens, E hidden, X experts, A active experts of a token, F width of an expert.
#pragma once

#include "linear.h"

// y = the sum over a token's experts of down(act(gate(x)) * up(x)) times their router weight, added
// in float32 in the order of the experts' numbers and rounded once. The matrices of all experts are
// alike, and their rows fill panels. Experts whose matrices have no codes are elsewhere: they are
// counted and not computed.
struct RlExperts {
  const RlMatrix* gate_up;     // [X]
  const RlMatrix* down;        // [X]
  const void* x;
  void* y;                     // [T, E] of the dtype of x, without gaps
  const void* const* gate_up_bias;  // [X] of [2 * F], or null
  const void* const* down_bias;     // [X] of [E], or null
  const float* weights;        // [T, A]
  const int64_t* chosen;       // [T, A]: numbers of experts
  int64_t* load;               // [X] grows by the tokens of each expert; or null
  const void* beside;          // [T, E] of the dtype of x: is added too; or null
  const float* beside_weights; // [T] of what is added, or null: 1
  int64_t tokens, active, experts, x_stride, beside_stride;
  int32_t x_dtype, bias_dtype, gate, unused;  // gate: as `gated` of RlLinear
};

// Which experts does a token go to? Scores are the softmax or sigmoid of its logits; those of the
// largest scores (plus `bias`; of the best groups alone) are chosen, best first, of equals the
// lowest number. Weights are their scores, made to sum to one if so, times `scale`.
struct RlRoute {
  const void* logits;   // [T, X]; with `shared` one more column
  const float* bias;    // [X] or null
  float* weights;       // [T, A]
  int64_t* chosen;      // [T, A]
  float* shared;        // [T]: the sigmoid of the last column; or null
  int64_t tokens, experts, active, logits_stride;
  int64_t groups, active_groups, group_best;  // groups: 1 where there are none
  int64_t logits_dtype, is_sigmoid, renormalizes;
  double scale;
};

// 1: a number of an expert is out of range.
RL_API int rl_experts(const RlExperts* call);
RL_API int rl_route(const RlRoute* call);
