// Dot products of 512 bit vectors, as fast as they go; `PEAK` names the variant's function.
#include "peak.h"

#include "linear_ops512.h"

namespace {

constexpr int CHAINS = 12;  // two units, up to 5 cycles each

template <class Step>
void run_chains(int64_t steps) {
  alignas(64) char line[LINE] = {};
  typename Step::X x[2] = {};
  typename Step::Acc acc[CHAINS];
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; ++i) acc[i] = Step::zero();
  auto w = Step::load(line);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; ++i) acc[i] = Step::dot(acc[i], w, x, 0);
  }
#pragma GCC unroll 12
  for (int i = 1; i < CHAINS; ++i) acc[0] = Step::add(acc[0], acc[i]);
  alignas(64) float out[PANEL];
  Step::store(out, acc[0]);
  __asm__ volatile("" ::"m"(out));  // else there is no need to compute it
}

}  // namespace

int64_t PEAK(int format, int64_t steps) {
  bool floats = format == RL_W_BF16;
  floats ? run_chains<Ops::Bf16>(steps) : run_chains<Ops::Int8>(steps);
  return CHAINS * PANEL * 2 * (floats ? 2 : 4);
}
