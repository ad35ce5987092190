// Which products show what the processor can do? Those that the linear layers are made of.
#include "peak.h"

#include <atomic>

#include "isa.h"

namespace {

struct Shared {
  const RlPeak* call;
  std::atomic<int64_t> operations{0};
};

void peak_task(void* raw, int, int) {
  auto* shared = static_cast<Shared*>(raw);
  const RlPeak& call = *shared->call;
  int level = isa_level();
  int64_t of_a_step = level == ISA_AMX    ? peak_amx(call.format, call.steps)
                      : level == ISA_BF16 ? peak_bf16(call.format, call.steps)
                                          : peak_avx512(call.format, call.steps);
  shared->operations.fetch_add(of_a_step * call.steps, std::memory_order_relaxed);
}

}  // namespace

RL_API int rl_peak(RlPeak* call) {
  if (isa_level() < ISA_AVX512) return 2;
  Shared shared{call, {}};
  pool_run(call->tasks, peak_task, &shared);
  call->operations = shared.operations.load();
  return 0;
}
