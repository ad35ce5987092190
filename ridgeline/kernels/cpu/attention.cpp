// How is the attention of a step cut into work for threads? Prompts by tiles of queries, few new
// tokens by the keys of each, so that one long request keeps all threads busy.
//
// How a token's keys are cut depends on how many these are and on nothing else, so that a token has
// the same answer, bit for bit, alone and among drafts that are checked together.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "isa.h"

namespace {

constexpr int64_t MIN_KEYS = 128;   // of a part of one token's keys
constexpr int64_t PART_KEYS = 512;  // from here on a part costs nothing
constexpr int64_t PARTS = 4;        // for each thread, so that none waits long for the others
constexpr int64_t ALONE = 1 << 15;  // multiplications that are done before others would be awake

struct Merge {
  int64_t token, partial, count;
};

struct Step {
  const AttentionArgs* args;
  const AttentionVariant* variant;
  std::vector<AttentionItem> items;
  std::vector<Merge> merges;
  std::vector<float> partials, scratch;
  int64_t many = 0;  // items that are tiles of queries; they come first
  int64_t num_partials = 0;
  int64_t scratch_floats = 0;
  float* aligned = nullptr;  // where the scratch begins, at a line of memory
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
          {int32_t(request), int32_t(head), begin, std::min(begin + size, num_new), 0, 0, 0, -1,
           0});
}

struct Parts {  // of one token's keys
  int64_t begin, end, keys, count;
};

Parts parts_of(const AttentionArgs& a, int64_t position) {
  int64_t begin = first_key(a, position), num = position + 1 - begin, threads = pool_threads();
  if (num * a.heads * a.head_dim <= ALONE || threads == 1) return {begin, position + 1, num, 1};
  int64_t wanted = threads * std::clamp<int64_t>(num / (threads * PART_KEYS), 1, PARTS);
  int64_t keys = std::max(MIN_KEYS, ((num + wanted - 1) / wanted + 31) / 32 * 32);
  return {begin, position + 1, keys, (num + keys - 1) / keys};
}

// New tokens of a request whose keys are cut alike are taken together, but for what other threads
// can do: the answers are the same.
void add_few(Step& s, int64_t request, int64_t num_new) {
  const AttentionArgs& a = *s.args;
  int64_t first = a.query_start[request], position = a.seq_lens[request] - num_new;
  for (int64_t i = 0, next; i < num_new; i = next) {
    Parts parts = parts_of(a, position + i);
    int64_t others = parts.count * a.num_requests;
    int64_t items = (pool_threads() + others - 1) / others;
    int64_t most = std::min(most_tokens(a), (num_new + items - 1) / items);
    for (next = i + 1; next < num_new && next - i < most; ++next) {
      Parts other = parts_of(a, position + next);
      if (other.begin != parts.begin || other.count != parts.count) break;
      if (other.count > 1 && other.keys != parts.keys) break;
    }
    int64_t partial = parts.count > 1 ? s.num_partials : -1;
    for (int64_t j = i; partial >= 0 && j < next; ++j) {
      s.merges.push_back({first + j, s.num_partials, parts.count});
      s.num_partials += parts.count;
    }
    for (int64_t part = 0; part < parts.count; ++part) {
      int64_t begin = parts.begin + part * parts.keys;
      bool is_last = part + 1 == parts.count;
      s.items.push_back({int32_t(request), 0, begin, is_last ? parts.end : begin + parts.keys,
                         first + i, next - i, is_last, partial < 0 ? -1 : partial + part,
                         parts.count});
    }
  }
}

void run_item(void* raw, int task, int thread) {
  Step& s = *static_cast<Step*>(raw);
  float* scratch = s.aligned + thread * s.scratch_floats;
  if (task < s.many) {
    s.variant->many(*s.args, s.items[task], scratch);
  } else {
    s.variant->few(*s.args, s.items[task], s.partials.data(), scratch);
  }
}

void run_merge(void* raw, int task, int) {
  Step& s = *static_cast<Step*>(raw);
  const Merge& m = s.merges[task];
  const float* partials = s.partials.data() + m.partial * partial_floats(*s.args);
  s.variant->merge(*s.args, m.token, partials, m.count);
}

const AttentionVariant* variant() {
  int level = isa_level();
  if (level >= ISA_AMX) return attention_amx();
  if (level >= ISA_BF16) return attention_bf16();
  return level >= ISA_AVX512 ? attention_avx512() : attention_avx2();
}

void plan(Step& s) {
  const AttentionArgs& a = *s.args;
  auto num_new = [&a](int64_t b) { return int64_t(a.query_start[b + 1] - a.query_start[b]); };
  for (int64_t b = 0; b < a.num_requests; ++b)
    if (num_new(b) > FEW_TOKENS) add_tiles(s, b, num_new(b));
  s.many = int64_t(s.items.size());
  for (int64_t b = 0; b < a.num_requests; ++b)
    if (num_new(b) <= FEW_TOKENS) add_few(s, b, num_new(b));
}

void run(Step& s, int64_t count, void (*f)(void*, int, int), bool together) {
  if (together) return pool_run(int(count), f, &s);
  for (int64_t i = 0; i < count; ++i) f(&s, int(i), 0);
}

}  // namespace

RL_API int rl_attention(const AttentionArgs* args) {
  thread_local Step s;
  s.args = args, s.variant = variant();
  s.items.clear(), s.merges.clear(), s.num_partials = 0;
  plan(s);
  s.scratch_floats = s.variant->scratch_floats(*args);
  s.partials.resize(std::max<size_t>(s.partials.size(), s.num_partials * partial_floats(*args)));
  s.scratch.resize(std::max<size_t>(s.scratch.size(), pool_threads() * s.scratch_floats + 16));
  uintptr_t place = reinterpret_cast<uintptr_t>(s.scratch.data());
  s.aligned = s.scratch.data() + (64 - place % 64) % 64 / 4;
  int64_t keys = 0;
  for (const AttentionItem& item : s.items) keys += (item.end - item.begin) * item.tokens;
  bool is_small = s.many == 0 && keys * args->heads * args->head_dim <= ALONE;
  run(s, int64_t(s.items.size()), run_item, !is_small);
  run(s, int64_t(s.merges.size()), run_merge, s.merges.size() > 3);
  return 0;
}
