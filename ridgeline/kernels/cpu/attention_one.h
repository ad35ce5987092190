// How does one token look at the keys before it? All heads of a block of keys together, as they lie.
//
// Included by one file for each variant; see elementwise_wide.h. T is what queries and answers are
// made of, C what the cache is.
#include "attention_query.h"
#include "attention_values.h"

namespace {

constexpr float LOWEST = -1e30f;  // a maximum before anything is seen

// What is known of all heads of a token: unscaled sums [H, padded D], maxima, weights.
struct State {
  float *sums, *most, *weight;
};

inline State state_at(const AttentionArgs& a, float* floats) {
  float* most = floats + a.heads * padded_head(a.head_dim);
  return {floats, most, most + a.heads};
}

// scores[g][j] of G heads (1, 2 or 4) and all keys of a block. Keys behind the last one repeat it.
template <class T, class C, int G>
inline void score(const AttentionArgs& a, const C* k, const float* scales, const int64_t* offsets,
                  int64_t num, const float* q, float* scores) {
  constexpr int AT_ONCE = W / G;
  int64_t stride = padded_head(a.head_dim);
  for (int64_t j = 0; j < num; j += AT_ONCE) {
    F dots[W], dot[G];
    for (int i = 0; i < AT_ONCE; ++i) {
      const C* key = k + offsets[least(j + i, num - 1)];
      Query<T, C>::template dots<G>(key, q, stride, a.head_dim, dot);
      for (int g = 0; g < G; ++g) dots[g * AT_ONCE + i] = dot[g];
    }
    float found[W];
    store(found, sums_of(dots) * float(a.scale));
    for (int g = 0; g < G; ++g)
      std::memcpy(scores + g * KEYS + j, found + g * AT_ONCE, sizeof(float) * AT_ONCE);
  }
  if (HAS_SCALES<C>) {
    for (int64_t j = 0; j < num; j += W)
      for (int g = 0; g < G; ++g)
        store(scores + g * KEYS + j, load(scores + g * KEYS + j) * load(scales + j));
  }
  for (int g = 0; g < G; ++g)
    for (int64_t j = num; j < (num + W - 1) / W * W; ++j) scores[g * KEYS + j] = -__builtin_inff();
}

// Keys and values of one KV head, at places `offsets`, and their scales, if the cache has them.
template <class C>
struct Seen {
  const C *k, *v;
  const int64_t* offsets;
  int64_t num;
  float k_scales[KEYS], v_scales[KEYS];
};

// A block of keys for G heads of one KV head, from head `h` on.
template <class T, class C, int G>
inline void see(const AttentionArgs& a, int64_t h, const Seen<C>& seen, const float* q, State state,
                Ahead& ahead) {
  const int64_t num = seen.num;
  int64_t stride = padded_head(a.head_dim);
  float scores[G * KEYS], kept[G];
  score<T, C, G>(a, seen.k, seen.k_scales, seen.offsets, num, q + h * stride, scores);
  for (int g = 0; g < G; ++g) {
    F most = all(state.most[h + g]);
    for (int64_t j = 0; j < num; j += W) most = larger(load(scores + g * KEYS + j), most);
    float new_most = max_of(most);
    F weight = {};
    for (int64_t j = 0; j < num; j += W) {
      F p = exp_of(load(scores + g * KEYS + j) - new_most);
      weight += p;
      store(scores + g * KEYS + j, HAS_SCALES<C> ? p * load(seen.v_scales + j) : p);
    }
    kept[g] = exp_one(state.most[h + g] - new_most);
    state.weight[h + g] = state.weight[h + g] * kept[g] + sum_of(weight);
    state.most[h + g] = new_most;
  }
  gather_all<C, G>(a, seen.v, seen.offsets, num, scores, kept, state.sums + h * stride, ahead);
}

template <class T>
void finish(const AttentionArgs& a, int64_t request, State state) {
  int64_t size = a.head_dim;
  T* out = static_cast<T*>(a.out) + a.query_start[request] * a.out_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    float scale = state.weight[h] == 0 ? 0.0f : 1.0f / state.weight[h];
    const float* sums = state.sums + h * padded_head(size);
    for (int64_t d = 0; d < size; d += W)
      store_some(out + h * size + d, load(sums + d) * scale, size - d);
  }
}

// Read a number of each line of a key and its value, all heads: for the first block.
template <class C>
inline void fetch(const AttentionArgs& a, int64_t offset) {
  const int64_t bytes = ((a.kv_heads - 1) * a.head_stride + a.head_dim) * int64_t(sizeof(C));
  const char* k = (const char*)(static_cast<const C*>(a.k) + offset);
  const char* v = (const char*)(static_cast<const C*>(a.v) + offset);
  char sink = 0;
  for (int64_t i = 0; i < bytes; i += 64) sink ^= k[i];
  for (int64_t i = 0; i < bytes; i += 64) sink ^= v[i];
  asm volatile("" : : "r"(sink));
}

template <class T, class C>
void one_token(const AttentionArgs& a, const AttentionItem& item, float* partials, float* scratch) {
  int64_t size = a.head_dim, stride = padded_head(size), group = a.heads / a.kv_heads;
  float* q = scratch;
  float* own = scratch + a.heads * stride;
  State state = state_at(a, item.partial < 0 ? own : partials + item.partial * partial_floats(a));
  std::memset(state.sums, 0, a.heads * stride * 4);
  const T* queries = static_cast<const T*>(a.q) + a.query_start[item.request] * a.q_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    state.most[h] = LOWEST, state.weight[h] = 0;
    Query<T, C>::take(queries + h * size, q + h * stride, size);
  }
  Blocks blocks = blocks_of(a, item.request), scales = scales_of(a, item.request);
  int64_t offsets[2][KEYS], places[KEYS];
  int64_t num = least(KEYS, item.end - item.begin);
  blocks.offsets(item.begin, num, offsets[0]);
  for (int64_t j = 0; j < num; ++j) fetch<C>(a, offsets[0][j]);
  for (int64_t begin = item.begin, turn = 0; begin < item.end; begin += KEYS, turn ^= 1) {
    int64_t next = begin + KEYS, coming = next < item.end ? least(KEYS, item.end - next) : 0;
    blocks.offsets(next, coming, offsets[turn ^ 1]);
    if (HAS_SCALES<C>) scales.offsets(begin, num, places);
    const int64_t width = sizeof(C), bytes = a.kv_heads * size * width;
    Ahead ahead{(const char*)a.k, (const char*)a.v, offsets[turn ^ 1], coming, width, bytes,
                2 * size * width, 0, 0};
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      Seen<C> seen;
      seen.k = static_cast<const C*>(a.k) + head * a.head_stride;
      seen.v = static_cast<const C*>(a.v) + head * a.head_stride;
      seen.offsets = offsets[turn], seen.num = num;
      if (HAS_SCALES<C>) {
        take_scales(a.k_scales + head, places, num, seen.k_scales);
        take_scales(a.v_scales + head, places, num, seen.v_scales);
      }
      int64_t h = head * group, end = h + group;
      for (; h + 4 <= end; h += 4) see<T, C, 4>(a, h, seen, q, state, ahead);
      if (h + 2 <= end) {
        see<T, C, 2>(a, h, seen, q, state, ahead);
        h += 2;
      }
      if (h < end) see<T, C, 1>(a, h, seen, q, state, ahead);
    }
    num = coming;
  }
  if (item.partial < 0) finish<T>(a, item.request, state);
}

template <class T>
void merge_parts(const AttentionArgs& a, int64_t request, const float* partials, int64_t count) {
  int64_t size = a.head_dim, stride = padded_head(size);
  T* out = static_cast<T*>(a.out) + a.query_start[request] * a.out_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    float most = LOWEST, weight = 0;
    auto part = [&](int64_t i) {
      return state_at(a, const_cast<float*>(partials) + i * partial_floats(a));
    };
    for (int64_t i = 0; i < count; ++i) most = part(i).most[h] > most ? part(i).most[h] : most;
    for (int64_t i = 0; i < count; ++i)
      weight += part(i).weight[h] * exp_one(part(i).most[h] - most);
    float scale = weight == 0 ? 0.0f : 1.0f / weight;
    for (int64_t d = 0; d < size; d += W) {
      F sum = {};
      for (int64_t i = 0; i < count; ++i)
        sum += load(part(i).sums + h * stride + d) * exp_one(part(i).most[h] - most);
      store_some(out + h * size + d, sum * scale, size - d);
    }
  }
}

}  // namespace
