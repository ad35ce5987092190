// Who multiplies? Chooses the variant, cuts the work into tasks and lends the memory for x.
#include "linear.h"

#include "isa.h"
#include "scratch.h"

namespace {

constexpr int64_t MAX_ROWS = 1024;  // of x prepared at once

thread_local Scratch scratch;

struct Shared {
  const LinearVariant* variant;
  const LinearPlan* plan;
};

void prepare_task(void* raw, int task, int) {
  auto* shared = static_cast<Shared*>(raw);
  shared->variant->prepare(*shared->plan, task);
}

void multiply_task(void* raw, int task, int thread) {
  auto* shared = static_cast<Shared*>(raw);
  const LinearPlan& plan = *shared->plan;
  int64_t begin = task * plan.units_a_task, end = begin + plan.units_a_task;
  shared->variant->multiply(plan, thread, begin, end < plan.units ? end : plan.units);
}

}  // namespace

LinearVariant linear_variant(int64_t rows) {
  switch (isa_level()) {
    case ISA_AMX: return linear_amx(rows);
    case ISA_BF16: return linear_bf16();
    case ISA_AVX512: return linear_avx512();
    default: return linear_avx2();
  }
}

RL_API int rl_linear(const RlLinear* call) {
  if (isa_level() < ISA_AVX2) return 2;
  int64_t panels = up(call->matrix.outputs, PANEL) / PANEL;
  LinearPlan plan{};
  plan.call = call;
  plan.units = call->gated ? panels / 2 : panels;
  for (plan.row_begin = 0; plan.row_begin < call->rows; plan.row_begin += plan.rows) {
    int64_t left = call->rows - plan.row_begin;
    plan.rows = left < MAX_ROWS ? left : MAX_ROWS;
    const LinearVariant chosen = linear_variant(plan.rows);
    int64_t for_x = up(chosen.scratch_bytes(*call, plan.rows), 64);
    plan.units_a_task = chosen.task_units(*call, plan.rows, plan.units);
    plan.thread_bytes = up(chosen.thread_bytes(*call, plan.rows), 64);
    plan.scratch = scratch.at_least(for_x + plan.thread_bytes * pool_threads() + 64);
    if (plan.scratch == nullptr) return 3;
    plan.thread_scratch = plan.scratch + for_x;
    Shared shared{&chosen, &plan};
    int prepares = chosen.prepare_tasks(plan);
    if (plan.rows * call->matrix.inputs < ALONE_NUMBERS)
      for (int task = 0; task < prepares; ++task) chosen.prepare(plan, task);
    else
      pool_run(prepares, prepare_task, &shared);
    int64_t tasks = (plan.units + plan.units_a_task - 1) / plan.units_a_task;
    pool_run(int(tasks), multiply_task, &shared);
  }
  return 0;
}
