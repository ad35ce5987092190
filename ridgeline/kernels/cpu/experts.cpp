// How are the products of all experts of a layer shared between threads?
//
// The pairs of a token and one of its experts are sorted by expert. Two rounds of tasks follow: gate
// and up, a task some panels of one expert; and down, a task some columns of y for all experts, one
// after the other, so that sums have one order and no two threads meet.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "isa.h"
#include "scratch.h"

namespace {

constexpr int64_t MOST_PAIRS = 4096, MOST_BYTES = 32 << 20;  // of a pass over the tokens
constexpr int64_t MANY_ROWS = 16;  // of an expert, from which on memory is not the limit
constexpr float LEAST_SUM = 1e-20f;  // of weights that are divided by their sum

int64_t bytes_of(int dtype) { return dtype == RL_BF16 ? 2 : 4; }

struct Product {  // of one expert
  LinearVariant variant;
  RlLinear call;
  LinearPlan plan;
  int64_t prepares, tasks;  // before those of the next expert
};

struct Pass {  // over some tokens
  const RlExperts* args;
  int64_t begin, end;
  std::vector<int32_t> tokens;   // of each pair
  std::vector<float> weights;    // of each pair
  std::vector<int64_t> firsts;   // [X + 1]: pairs before those of an expert
  std::vector<Product> products;
  float* sums;                   // [tokens][E]
  int64_t units_a_task;          // of the down products
};

bool is_here(const RlExperts& a, int64_t expert) { return a.gate_up[expert].codes; }

// Of experts that are here. False if a number of an expert is out of range.
bool sort_pairs(Pass& p) {
  const RlExperts& a = *p.args;
  const int64_t* first = a.chosen + p.begin * a.active;
  int64_t pairs = (p.end - p.begin) * a.active;
  p.firsts.assign(size_t(a.experts) + 2, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    if (first[i] < 0 || first[i] >= a.experts) return false;
    ++p.firsts[size_t(first[i]) + 2];
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    if (a.load) a.load[e] += p.firsts[size_t(e) + 2];
    if (!is_here(a, e)) p.firsts[size_t(e) + 2] = 0;
    p.firsts[size_t(e) + 2] += p.firsts[size_t(e) + 1];
  }
  p.tokens.resize(size_t(p.firsts.back()));
  p.weights.resize(size_t(p.firsts.back()));
  for (int64_t i = 0; i < pairs; ++i) {
    if (!is_here(a, first[i])) continue;
    size_t place = size_t(p.firsts[size_t(first[i]) + 1]++);
    p.tokens[place] = int32_t(i / a.active);
    p.weights[place] = a.weights[p.begin * a.active + i];
  }
  return true;
}

int64_t rows_of(const Pass& p, int64_t expert) {
  return p.firsts[size_t(expert) + 1] - p.firsts[size_t(expert)];
}

// Its x are rows of the call's, gathered as they are prepared.
RlLinear gate_up_of(const Pass& p, int64_t expert, char* inner) {
  const RlExperts& a = *p.args;
  int64_t first = p.firsts[size_t(expert)], width = a.down->inputs;
  RlLinear c{};
  c.matrix = a.gate_up[expert];
  c.x = static_cast<const char*>(a.x) + p.begin * a.x_stride * bytes_of(a.x_dtype);
  c.x_rows = p.tokens.data() + first;
  c.y = inner + first * width * bytes_of(a.x_dtype);
  c.bias = a.gate_up_bias ? a.gate_up_bias[expert] : nullptr;
  c.rows = rows_of(p, expert);
  c.x_stride = a.x_stride;
  c.y_stride = width;
  c.x_dtype = c.y_dtype = a.x_dtype;
  c.bias_dtype = a.bias_dtype;
  c.gated = a.gate;
  return c;
}

// Its y are added to the sums of their tokens.
RlLinear down_of(const Pass& p, int64_t expert, char* inner) {
  const RlExperts& a = *p.args;
  int64_t first = p.firsts[size_t(expert)], width = a.down->inputs;
  RlLinear c{};
  c.matrix = a.down[expert];
  c.x = inner + first * width * bytes_of(a.x_dtype);
  c.y = p.sums;
  c.residual = p.sums;
  c.y_rows = p.tokens.data() + first;
  c.row_weights = p.weights.data() + first;
  c.bias = a.down_bias ? a.down_bias[expert] : nullptr;
  c.rows = rows_of(p, expert);
  c.x_stride = width;
  c.y_stride = c.residual_stride = a.down->outputs;
  c.x_dtype = a.x_dtype;
  c.bias_dtype = a.bias_dtype;
  c.y_dtype = c.residual_dtype = RL_F32;
  return c;
}

// Of all experts with tokens; returns the bytes that prepared rows take. `is_shared`: one row, the
// same for all of them, which is prepared once.
template <class Of>
int64_t make_products(Pass& p, char* inner, bool is_shared, Of of) {
  int64_t bytes = 0;
  p.products.clear();
  for (int64_t expert = 0; expert < p.args->experts; ++expert) {
    if (!rows_of(p, expert)) continue;
    Product one{};
    one.call = of(p, expert, inner);
    one.variant = linear_variant(one.call.rows);
    int64_t panels = one.call.matrix.outputs / PANEL;
    one.plan.rows = one.call.rows;
    one.plan.units = one.call.gated ? panels / 2 : panels;
    one.plan.units_a_task = one.variant.task_units(one.call, one.plan.rows, one.plan.units);
    one.plan.thread_bytes = up(one.variant.thread_bytes(one.call, one.plan.rows), 64);
    one.plan.scratch = reinterpret_cast<char*>(is_shared ? 0 : bytes);  // from the first on
    if (!is_shared || !bytes) bytes += up(one.variant.scratch_bytes(one.call, one.plan.rows), 64);
    p.products.push_back(one);
  }
  return bytes;
}

int64_t most_thread_bytes(const Pass& p) {
  int64_t most = 0;
  for (const Product& one : p.products) most = std::max(most, one.plan.thread_bytes);
  return most;
}

// Now that all products stand where they stay, and memory is there.
void place(Pass& p, char* prepared, char* of_threads, int64_t thread_bytes, bool is_shared) {
  int64_t prepares = 0, tasks = 0;
  for (Product& one : p.products) {
    one.plan.call = &one.call;
    one.plan.scratch = prepared + reinterpret_cast<intptr_t>(one.plan.scratch);
    one.plan.thread_scratch = of_threads;
    one.plan.thread_bytes = thread_bytes;
    if (!is_shared || !prepares) prepares += one.variant.prepare_tasks(one.plan);
    tasks += (one.plan.units + one.plan.units_a_task - 1) / one.plan.units_a_task;
    one.prepares = prepares;
    one.tasks = tasks;
  }
}

template <int64_t Product::*UP_TO>
const Product& product_at(const Pass& p, int64_t task, int64_t* inside) {
  auto is_before = [](int64_t wanted, const Product& one) { return wanted < one.*UP_TO; };
  auto found = std::upper_bound(p.products.begin(), p.products.end(), task, is_before);
  *inside = found == p.products.begin() ? task : task - (*(found - 1)).*UP_TO;
  return *found;
}

void prepare_task(void* raw, int task, int) {
  int64_t inside;
  const Product& one = product_at<&Product::prepares>(*static_cast<Pass*>(raw), task, &inside);
  one.variant.prepare(one.plan, int(inside));
}

void prepare(Pass& p) {
  int64_t numbers = 0;
  for (const Product& one : p.products) numbers += one.call.rows * one.call.matrix.inputs;
  int tasks = int(p.products.back().prepares);
  if (numbers >= ALONE_NUMBERS) return pool_run(tasks, prepare_task, &p);
  for (int task = 0; task < tasks; ++task) prepare_task(&p, task, 0);
}

void gate_up_task(void* raw, int task, int thread) {
  int64_t inside;
  const Product& one = product_at<&Product::tasks>(*static_cast<Pass*>(raw), task, &inside);
  int64_t begin = inside * one.plan.units_a_task, end = begin + one.plan.units_a_task;
  one.variant.multiply(one.plan, thread, begin, std::min(end, one.plan.units));
}

void down_task(void* raw, int task, int thread) {
  Pass& p = *static_cast<Pass*>(raw);
  const RlExperts& a = *p.args;
  int64_t width = a.down->outputs, begin = task * p.units_a_task;
  int64_t end = std::min(begin + p.units_a_task, width / PANEL);
  int64_t left = begin * PANEL, right = end * PANEL;
  for (int64_t t = p.begin; t < p.end; ++t) {
    float* sums = p.sums + (t - p.begin) * width;
    float weight = a.beside_weights ? a.beside_weights[t] : 1.0f;
    if (!a.beside) std::memset(sums + left, 0, size_t(right - left) * 4);
    for (int64_t i = left; a.beside && i < right; ++i)
      sums[i] = load_number(a.beside, t * a.beside_stride + i, a.x_dtype) * weight;
  }
  for (const Product& one : p.products) one.variant.multiply(one.plan, thread, begin, end);
  if (a.x_dtype != RL_BF16) return;
  for (int64_t t = p.begin; t < p.end; ++t) {
    const float* sums = p.sums + (t - p.begin) * width;
    bf16* y = static_cast<bf16*>(a.y) + t * width;
    for (int64_t i = left; i < right; ++i) y[i] = to_bf16(sums[i]);
  }
}

// Columns of y: as much of the weights in a task as a linear layer has, or where rows are many a
// share of the work; panels are taken in pairs.
int64_t down_units(const Pass& p) {
  const RlMatrix& m = *p.args->down;
  int64_t experts = std::max(int64_t(p.products.size()), int64_t(1)), panels = m.outputs / PANEL;
  int64_t by_threads = panels / (8 * pool_threads());
  bool is_many = int64_t(p.tokens.size()) >= MANY_ROWS * experts;
  int64_t wanted = is_many ? by_threads : TASK_BYTES / (experts * panel_lines(m) * LINE);
  wanted = std::min(wanted, by_threads) & ~int64_t(1);
  return std::max(wanted, int64_t(2));
}

// Tokens of a pass.
int64_t pass_tokens(const RlExperts& a) {
  int64_t of_x = 2 * std::max(a.gate_up->inputs, a.down->inputs);  // prepared, with scales
  int64_t a_pair = of_x + a.down->inputs * bytes_of(a.x_dtype);
  int64_t most = std::min(MOST_PAIRS, MOST_BYTES / a_pair) / a.active;
  int64_t passes = (a.tokens + std::max(most, int64_t(1)) - 1) / std::max(most, int64_t(1));
  return (a.tokens + passes - 1) / passes;
}

thread_local Scratch of_prepared, of_inner, of_sums, of_all_threads;

int run_pass(Pass& p) {
  const RlExperts& a = *p.args;
  int64_t num = p.end - p.begin, width = a.down->inputs;
  char* inner = of_inner.at_least(num * a.active * width * bytes_of(a.x_dtype));
  p.sums = static_cast<float*>(a.y) + p.begin * a.down->outputs;
  if (a.x_dtype == RL_BF16)
    p.sums = reinterpret_cast<float*>(of_sums.at_least(num * a.down->outputs * 4));
  if (!inner || !p.sums) return 3;
  for (bool is_down : {false, true}) {
    bool is_shared = !is_down && num == 1;
    int64_t bytes = is_down ? make_products(p, inner, is_shared, down_of)
                            : make_products(p, inner, is_shared, gate_up_of);
    int64_t thread_bytes = most_thread_bytes(p);
    char* prepared = of_prepared.at_least(bytes);
    char* of_threads = of_all_threads.at_least(thread_bytes * pool_threads() + 64);
    if (!prepared || !of_threads) return 3;
    place(p, prepared, of_threads, thread_bytes, is_shared);
    if (!p.products.empty()) prepare(p);
    p.units_a_task = is_down ? down_units(p) : 0;
    int64_t panels = a.down->outputs / PANEL;
    int64_t tasks = is_down ? (panels + p.units_a_task - 1) / p.units_a_task
                            : p.products.empty() ? 0 : p.products.back().tasks;
    if (tasks) pool_run(int(tasks), is_down ? down_task : gate_up_task, &p);
  }
  return 0;
}

// ---- the router ------------------------------------------------------------------------------

// Softmax or sigmoid.
void score(const RlRoute& r, const float* logits, float* scores) {
  if (r.is_sigmoid) {
    for (int64_t x = 0; x < r.experts; ++x) scores[x] = 1.0f / (1.0f + std::exp(-logits[x]));
    return;
  }
  float most = *std::max_element(logits, logits + r.experts), sum = 0.0f;
  for (int64_t x = 0; x < r.experts; ++x) sum += scores[x] = std::exp(logits[x] - most);
  for (int64_t x = 0; x < r.experts; ++x) scores[x] /= sum;
}

// The best `count` of `size` numbers, best first; of equals the lowest place. NaN is never better.
void best_of(const float* numbers, int64_t size, int64_t count, int64_t* places) {
  for (int64_t found = 0; found < count; ++found) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; ++i) {
      if (best >= 0 && !(numbers[i] > numbers[best])) continue;
      if (std::find(places, places + found, i) == places + found) best = i;
    }
    places[found] = best;
  }
}

// Minus infinity for experts of other groups than the best, by the sum of each one's best.
void keep_best_groups(const RlRoute& r, float* choice, std::vector<int64_t>& places,
                      std::vector<float>& of_groups) {
  int64_t size = r.experts / r.groups;
  of_groups.assign(size_t(r.groups), 0.0f);
  places.resize(size_t(std::max(r.group_best, r.active_groups)));
  for (int64_t g = 0; g < r.groups; ++g) {
    best_of(choice + g * size, size, r.group_best, places.data());
    for (int64_t i = 0; i < r.group_best; ++i)
      of_groups[size_t(g)] += choice[g * size + places[size_t(i)]];
  }
  best_of(of_groups.data(), r.groups, r.active_groups, places.data());
  for (int64_t g = 0; g < r.groups; ++g) {
    auto end = places.begin() + r.active_groups;
    if (std::find(places.begin(), end, g) != end) continue;
    std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
  }
}

void route_token(const RlRoute& r, int64_t token) {
  thread_local std::vector<float> logits, scores, choice, of_groups;
  thread_local std::vector<int64_t> places;
  float* weights = r.weights + token * r.active;
  int64_t* chosen = r.chosen + token * r.active;
  logits.resize(size_t(r.experts) + 1);
  scores.resize(size_t(r.experts));
  for (int64_t x = 0; x < r.experts + (r.shared ? 1 : 0); ++x)
    logits[size_t(x)] = load_number(r.logits, token * r.logits_stride + x, int(r.logits_dtype));
  score(r, logits.data(), scores.data());
  choice = scores;
  for (int64_t x = 0; r.bias && x < r.experts; ++x) choice[size_t(x)] += r.bias[x];
  if (r.groups > 1) keep_best_groups(r, choice.data(), places, of_groups);
  best_of(choice.data(), r.experts, r.active, chosen);
  float sum = 0.0f;
  for (int64_t i = 0; i < r.active; ++i) sum += weights[i] = scores[size_t(chosen[i])];
  for (int64_t i = 0; i < r.active; ++i) {
    if (r.renormalizes) weights[i] /= std::max(sum, LEAST_SUM);
    weights[i] *= float(r.scale);
  }
  if (r.shared) r.shared[token] = 1.0f / (1.0f + std::exp(-logits[size_t(r.experts)]));
}

constexpr int64_t ROUTED_A_TASK = 16;  // tokens

void route_task(void* raw, int task, int) {
  const RlRoute& r = *static_cast<const RlRoute*>(raw);
  int64_t begin = task * ROUTED_A_TASK, end = std::min(begin + ROUTED_A_TASK, r.tokens);
  for (int64_t token = begin; token < end; ++token) route_token(r, token);
}

}  // namespace

RL_API int rl_experts(const RlExperts* call) {
  if (isa_level() < ISA_AVX2) return 2;
  thread_local Pass p;
  p.args = call;
  int64_t step = call->tokens ? pass_tokens(*call) : 1;
  for (p.begin = 0; p.begin < call->tokens; p.begin = p.end) {
    p.end = std::min(p.begin + step, call->tokens);
    if (!sort_pairs(p)) return 1;
    if (int code = run_pass(p)) return code;
  }
  return 0;
}

RL_API int rl_route(const RlRoute* call) {
  int64_t tasks = (call->tokens + ROUTED_A_TASK - 1) / ROUTED_A_TASK;
  pool_run(int(tasks), route_task, const_cast<RlRoute*>(call));
  return 0;
}
