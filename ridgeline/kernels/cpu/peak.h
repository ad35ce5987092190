// How many operations a second can the processor do, with all numbers in registers? The ceiling of
// products with many rows, as a plain read is that of products with few.
#pragma once

#include "linear.h"

struct RlPeak {
  int64_t steps;       // of each task: rounds of a few independent products
  int64_t operations;  // out: additions and multiplications of all tasks
  int32_t format;      // of the weights, as in RlMatrix
  int32_t tasks;
};

// 0, or 2 where the level has no dot products (AVX2).
RL_API int rl_peak(RlPeak* call);

// Operations of a step; it does `steps` of them.
int64_t peak_avx512(int format, int64_t steps);
int64_t peak_bf16(int format, int64_t steps);
int64_t peak_amx(int format, int64_t steps);
