// How is the attention of a step cut into work for threads? Prompts by tiles of queries, single
// tokens by their keys, so that one long request keeps all threads busy.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "isa.h"

namespace {

constexpr int64_t MIN_KEYS = 64;    // of a part of one token's keys
constexpr int64_t PARTS = 4;        // for each thread, so that none waits long for the others
constexpr int64_t ALONE = 1 << 15;  // multiplications that are done before others would be awake

struct Merge {
  int64_t request, partial, count;
};

struct Step {
  const AttentionArgs* args;
  const AttentionVariant* variant;
  std::vector<AttentionItem> items;
  std::vector<Merge> merges;
  std::vector<float> partials, scratch;
  int64_t many = 0;  // items that are tiles of queries; they come first
  int64_t scratch_floats = 0;
};

int64_t first_key(const AttentionArgs& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

void add_tiles(Step& s, int64_t request, int64_t num_new) {
  const AttentionArgs& a = *s.args;
  int64_t size = std::max<int64_t>(1, TILE_ROWS / (a.heads / a.kv_heads));
  for (int64_t begin = (num_new - 1) / size * size; begin >= 0; begin -= size)
    for (int64_t head = 0; head < a.kv_heads; ++head)
      s.items.push_back(
          {int32_t(request), int32_t(head), begin, std::min(begin + size, num_new), -1});
}

void add_parts(Step& s, int64_t request, int64_t begin, int64_t end, int64_t keys) {
  int64_t count = std::max<int64_t>(1, (end - begin + keys - 1) / keys);
  if (count == 1) {
    s.items.push_back({int32_t(request), 0, begin, end, -1});
    return;
  }
  int64_t first = s.merges.empty() ? 0 : s.merges.back().partial + s.merges.back().count;
  s.merges.push_back({request, first, count});
  for (int64_t i = 0; i < count; ++i)
    s.items.push_back(
        {int32_t(request), 0, begin + i * keys, std::min(begin + (i + 1) * keys, end), first + i});
}

void run_item(void* raw, int task, int thread) {
  Step& s = *static_cast<Step*>(raw);
  float* scratch = s.scratch.data() + thread * s.scratch_floats;
  if (task < s.many) {
    s.variant->many(*s.args, s.items[task], scratch);
  } else {
    s.variant->one(*s.args, s.items[task], s.partials.data(), scratch);
  }
}

void run_merge(void* raw, int task, int) {
  Step& s = *static_cast<Step*>(raw);
  const Merge& m = s.merges[task];
  const float* partials = s.partials.data() + m.partial * partial_floats(*s.args);
  s.variant->merge(*s.args, m.request, partials, m.count);
}

const AttentionVariant* variant() {
  int level = isa_level();
  if (level >= ISA_AMX) return attention_amx();
  if (level >= ISA_BF16) return attention_bf16();
  return level >= ISA_AVX512 ? attention_avx512() : attention_avx2();
}

void plan(Step& s) {
  const AttentionArgs& a = *s.args;
  int64_t keys = 0;
  for (int64_t b = 0; b < a.num_requests; ++b) {
    int64_t num_new = a.query_start[b + 1] - a.query_start[b];
    if (num_new == 1) keys += a.seq_lens[b] - first_key(a, a.seq_lens[b] - 1);
    if (num_new > 1) add_tiles(s, b, num_new);
  }
  s.many = int64_t(s.items.size());
  int64_t part = keys;
  if (s.many || keys * a.heads * a.head_dim > ALONE) {
    part = std::max(MIN_KEYS, keys / (PARTS * pool_threads()) + 1);
    part = (part + MIN_KEYS - 1) / MIN_KEYS * MIN_KEYS;
  }
  for (int64_t b = 0; b < a.num_requests; ++b) {
    if (a.query_start[b + 1] - a.query_start[b] != 1) continue;
    add_parts(s, b, first_key(a, a.seq_lens[b] - 1), a.seq_lens[b], std::max<int64_t>(1, part));
  }
}

void run(Step& s, int64_t count, void (*f)(void*, int, int), bool together) {
  if (together) return pool_run(int(count), f, &s);
  for (int64_t i = 0; i < count; ++i) f(&s, int(i), 0);
}

}  // namespace

RL_API int rl_attention(const AttentionArgs* args) {
  thread_local Step s;
  s.args = args, s.variant = variant();
  s.items.clear(), s.merges.clear();
  plan(s);
  s.scratch_floats = s.variant->scratch_floats(*args);
  if (!s.merges.empty()) {
    int64_t count = s.merges.back().partial + s.merges.back().count;
    s.partials.resize(std::max<size_t>(s.partials.size(), count * partial_floats(*args)));
  }
  s.scratch.resize(std::max<size_t>(s.scratch.size(), pool_threads() * s.scratch_floats));
  int64_t keys = 0;
  for (const AttentionItem& item : s.items) keys += item.end - item.begin;
  bool is_small = s.many == 0 && keys * args->heads * args->head_dim <= ALONE;
  run(s, int64_t(s.items.size()), run_item, !is_small);
  run(s, int64_t(s.merges.size()), run_merge, s.merges.size() > 3);
  return 0;
}
