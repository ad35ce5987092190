// How do few tokens look at the keys before them? All heads of a block of keys together, as they lie.
// Tokens of a request are as more heads, while they see the same keys; the numbers of each are those
// that it has alone.
//
// Included by one file for each variant; see elementwise_wide.h. T is what queries and answers are
// made of, C what the cache is; K what its codes are worked with as, if they are packed.
#include "attention_query.h"
#include "attention_values.h"

namespace {

constexpr float LOWEST = -1e30f;  // a maximum before anything is seen

// What is known of rows, that is of all heads of a token: unscaled sums [H, padded D], maxima,
// weights. Of several tokens the rows of a KV head are side by side, token by token.
struct State {
  float *sums, *most, *weight;
};

inline State state_at(const AttentionArgs& a, float* floats, int64_t tokens = 1) {
  int64_t rows = a.heads * tokens;
  float* most = floats + rows * padded_head(a.head_dim);
  return {floats, most, most + rows};
}

inline int64_t row_of(const AttentionArgs& a, int64_t head, int64_t token, int64_t tokens) {
  int64_t group = a.heads / a.kv_heads;
  return (head / group * tokens + token) * group + head % group;
}

// Keys and values of one KV head, at places `offsets`, and their scales and lows, if the cache has
// them.
template <class K>
struct Seen {
  const K *k, *v;
  const int64_t* offsets;
  int64_t num;
  float k_scales[KEYS], v_scales[KEYS], k_lows[KEYS], v_lows[KEYS];
};

// Of all heads, where codes have lows: the sum of a query's numbers, and of weighted lows of values.
struct Lows {
  float *all, *sums;
};

// scores[g][j] of G heads (1, 2 or 4) and all keys of a block. Keys behind the last one repeat it.
template <class T, class C, int G, bool LOWS>
inline void score(const AttentionArgs& a, const Seen<C>& seen, const float* q, const float* all_of,
                  float* scores) {
  constexpr int AT_ONCE = W / G;
  const C* k = seen.k;
  const float* scales = seen.k_scales;
  const int64_t *offsets = seen.offsets, num = seen.num;
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
      for (int g = 0; g < G; ++g) {
        F x = load(scores + g * KEYS + j) * load(scales + j);
        if (LOWS) x += load(seen.k_lows + j) * (all_of[g] * float(a.scale));
        store(scores + g * KEYS + j, x);
      }
  }
  for (int g = 0; a.cap && g < G; ++g)
    for (int64_t j = g * KEYS; j < g * KEYS + num; j += W)
      store(scores + j, capped(load(scores + j), float(a.cap)));
  for (int g = 0; g < G; ++g)
    for (int64_t j = num; j < (num + W - 1) / W * W; ++j) scores[g * KEYS + j] = -__builtin_inff();
}

// A block of keys for G heads of one KV head, from head `h` on.
template <class T, class C, int G, bool LOWS>
inline void see(const AttentionArgs& a, int64_t h, const Seen<C>& seen, const float* q, State state,
                Lows lows, Ahead& ahead) {
  const int64_t num = seen.num;
  int64_t stride = padded_head(a.head_dim);
  float scores[G * KEYS], kept[G];
  score<T, C, G, LOWS>(a, seen, q + h * stride, LOWS ? lows.all + h : nullptr, scores);
  for (int g = 0; g < G; ++g) {
    F most = all(state.most[h + g]);
    for (int64_t j = 0; j < num; j += W) most = larger(load(scores + g * KEYS + j), most);
    float new_most = max_of(most);
    F weight = {}, low = {};
    for (int64_t j = 0; j < num; j += W) {
      F p = exp_of(load(scores + g * KEYS + j) - new_most);
      weight += p;
      if (LOWS) low += p * load(seen.v_lows + j);
      store(scores + g * KEYS + j, HAS_SCALES<C> ? p * load(seen.v_scales + j) : p);
    }
    kept[g] = exp_one(state.most[h + g] - new_most);
    state.weight[h + g] = state.weight[h + g] * kept[g] + sum_of(weight);
    if (LOWS) lows.sums[h + g] = lows.sums[h + g] * kept[g] + sum_of(low);
    state.most[h + g] = new_most;
  }
  gather_all<C, G>(a, seen.v, seen.offsets, num, scores, kept, state.sums + h * stride, ahead);
}

// The answer of one token of those of an item, or its part of it.
template <class T>
void finish(const AttentionArgs& a, const AttentionItem& item, int64_t token, State state,
            float* partials) {
  int64_t size = a.head_dim, stride = padded_head(size);
  T* out = static_cast<T*>(a.out) + (item.token + token) * a.out_stride;
  bool is_part = item.partial >= 0;
  int64_t place = is_part ? (item.partial + token * item.parts) * partial_floats(a) : 0;
  State part = state_at(a, partials + place);
  for (int64_t h = 0; h < a.heads; ++h) {
    int64_t row = row_of(a, h, token, item.tokens);
    const float* sums = state.sums + row * stride;
    if (is_part) {
      std::memcpy(part.sums + h * stride, sums, stride * 4);
      part.most[h] = state.most[row], part.weight[h] = state.weight[row];
      continue;
    }
    float scale = share_of(a, h, state.most[row], state.weight[row]);
    for (int64_t d = 0; d < size; d += W)
      store_some(out + h * size + d, load(sums + d) * scale, size - d);
  }
}

// Read a number of each line of a key and its value, all heads: for the first block.
template <class C>
inline void fetch(const AttentionArgs& a, int64_t offset) {
  const int64_t bytes = (a.kv_heads - 1) * a.head_stride * int64_t(sizeof(C)) + head_bytes<C>(a);
  const char* k = (const char*)(static_cast<const C*>(a.k) + offset);
  const char* v = (const char*)(static_cast<const C*>(a.v) + offset);
  char sink = 0;
  for (int64_t i = 0; i < bytes; i += 64) sink ^= k[i];
  for (int64_t i = 0; i < bytes; i += 64) sink ^= v[i];
  asm volatile("" : : "r"(sink));
}

// Floats that packed codes need beside the others: `Lows`, and a block of keys and values unpacked.
inline int64_t packed_floats(const AttentionArgs& a, int64_t tokens) {
  return a.kv_dtype == RL_I4 ? 2 * a.heads * tokens + KEYS * a.head_dim / 2 : 0;
}

template <class T, class C>
void few_tokens(const AttentionArgs& a, const AttentionItem& item, float* partials,
                float* scratch) {
  using K = typename Worked<C>::type;
  using Q = typename Worked<C>::template Asked<T>;
  constexpr bool LOWS = IS_PACKED<C>;
  const int64_t size = a.head_dim, stride = padded_head(size), group = a.heads / a.kv_heads;
  const int64_t tokens = item.tokens, rows = a.heads * tokens;
  float* q = scratch;
  float* own = scratch + rows * stride;
  bool is_direct = item.partial >= 0 && tokens == 1;
  State state = state_at(a, is_direct ? partials + item.partial * partial_floats(a) : own, tokens);
  float* beside = own + tokens * partial_floats(a);
  Lows lows{beside, beside + rows};
  I8* unpacked = reinterpret_cast<I8*>(beside + 2 * rows);
  int64_t lines[KEYS];
  for (int64_t j = 0; j < KEYS; ++j) lines[j] = j * size;
  std::memset(state.sums, 0, rows * stride * 4);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* queries = static_cast<const T*>(a.q) + (item.token + t) * a.q_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      int64_t row = row_of(a, h, t, tokens);
      state.most[row] = LOWEST, state.weight[row] = 0;
      if constexpr (LOWS) {
        float turned[1024];
        lows.sums[row] = 0, lows.all[row] = rotate_query(queries + h * size, turned, size);
        Query<Q, K>::take(turned, q + row * stride, size);
      } else {
        Query<Q, K>::take(queries + h * size, q + row * stride, size);
      }
    }
  }
  Blocks blocks = blocks_of(a, item.request), scales = scales_of(a, item.request);
  const int64_t most = item.end + (item.grows ? tokens - 1 : 0);  // of the last token
  int64_t offsets[2][KEYS], places[KEYS];
  int64_t num = least(KEYS, most - item.begin);
  blocks.offsets(item.begin, num, offsets[0]);
  for (int64_t j = 0; j < num; ++j) fetch<C>(a, offsets[0][j]);
  for (int64_t begin = item.begin, turn = 0; begin < most; begin += KEYS, turn ^= 1) {
    int64_t next = begin + KEYS, coming = next < most ? least(KEYS, most - next) : 0;
    blocks.offsets(next, coming, offsets[turn ^ 1]);
    if (HAS_SCALES<C>) scales.offsets(begin, num, places);
    const int64_t width = sizeof(C), of_head = head_bytes<C>(a), bytes = a.kv_heads * of_head;
    Ahead ahead{(const char*)a.k, (const char*)a.v, offsets[turn ^ 1], coming, width, bytes,
                2 * of_head, 0, 0};
    bool is_shared = begin + num <= item.end || !item.grows;  // all tokens see these keys
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const C* k = static_cast<const C*>(a.k) + head * a.head_stride;
      const C* v = static_cast<const C*>(a.v) + head * a.head_stride;
      const int64_t scale = head * a.scale_head_stride;
      Seen<K> seen;
      if constexpr (LOWS) {
        for (int64_t j = 0; j < num; ++j) {
          unpack(k + offsets[turn][j], unpacked + j * size, size);
          unpack(v + offsets[turn][j], unpacked + (KEYS + j) * size, size);
        }
        seen.k = unpacked, seen.v = unpacked + KEYS * size, seen.offsets = lines;
      } else {
        seen.k = k, seen.v = v, seen.offsets = offsets[turn];
      }
      for (int64_t t = 0; t < (is_shared ? 1 : tokens); ++t) {
        seen.num = is_shared ? num : least(KEYS, item.end + t - begin);
        if (seen.num <= 0) continue;
        if (HAS_SCALES<C>) {
          take_scales(a.k_scales + scale, places, seen.num, seen.k_scales);
          take_scales(a.v_scales + scale, places, seen.num, seen.v_scales);
        }
        if (LOWS) {
          take_lows(a.k_lows + scale, seen.k_scales, places, seen.num, seen.k_lows);
          take_lows(a.v_lows + scale, seen.v_scales, places, seen.num, seen.v_lows);
        }
        int64_t h = (head * tokens + t) * group, end = h + group * (is_shared ? tokens : 1);
        for (; h + 4 <= end; h += 4) see<Q, K, 4, LOWS>(a, h, seen, q, state, lows, ahead);
        if (h + 2 <= end) {
          see<Q, K, 2, LOWS>(a, h, seen, q, state, lows, ahead);
          h += 2;
        }
        if (h < end) see<Q, K, 1, LOWS>(a, h, seen, q, state, lows, ahead);
      }
    }
    num = coming;
  }
  for (int64_t r = 0; LOWS && r < rows; ++r)
    for (int64_t d = 0; d < size; d += W)
      store(state.sums + r * stride + d, load(state.sums + r * stride + d) + lows.sums[r]);
  for (int64_t t = 0; !is_direct && t < tokens; ++t) finish<T>(a, item, t, state, partials);
}

template <class T>
void merge_parts(const AttentionArgs& a, int64_t token, const float* partials, int64_t count) {
  int64_t size = a.head_dim, stride = padded_head(size);
  T* out = static_cast<T*>(a.out) + token * a.out_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    float most = LOWEST, weight = 0, all_sums[1024 + W];
    std::memset(all_sums, 0, stride * 4);
    auto part = [&](int64_t i) {
      return state_at(a, const_cast<float*>(partials) + i * partial_floats(a));
    };
    for (int64_t i = 0; i < count; ++i) most = part(i).most[h] > most ? part(i).most[h] : most;
    for (int64_t i = 0; i < count; ++i) {
      float kept = exp_one(part(i).most[h] - most);
      const float* sums = part(i).sums + h * stride;
      weight += part(i).weight[h] * kept;
      for (int64_t d = 0; d < size; d += W)
        store(all_sums + d, load(all_sums + d) + load(sums + d) * kept);
    }
    float scale = share_of(a, h, most, weight);
    for (int64_t d = 0; d < size; d += W)
      store_some(out + h * size + d, load(all_sums + d) * scale, size - d);
  }
}

}  // namespace
