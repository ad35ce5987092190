// How is attention computed by one thread? With a running maximum, sums in float32, keys and values
// read from their blocks. Included by one file for each variant; see elementwise_wide.h.
//
// A single token goes over the keys as they lie, all heads of a block of keys together. Tokens of
// a prompt are rows of two small products, for which keys are packed by columns, and with
// AVX-512 BF16 in pairs. Words are 32 bits: one float, or a pair of bfloat16.
#include "attention.h"
#include "elementwise_wide.h"

namespace {

constexpr int64_t KEYS = 32;         // of one block of keys of a single token
constexpr float LOWEST = -1e30f;     // a maximum before anything is seen
constexpr int MR = 6;                // rows of a product that are in registers
#if defined(__AVX512F__)
constexpr int NV = 4;                // and vectors of columns
#else
constexpr int NV = 2;
#endif

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline float exp_one(float x) { return exp_of(all(x))[0]; }

// The blocks of one request.
struct Blocks {
  const int32_t* table;
  int64_t size, block_stride, slot_stride;

  // Of keys [begin, begin + num).
  void offsets(int64_t begin, int64_t num, int64_t* found) const {
    int64_t block = begin / size, place = begin % size;
    for (int64_t j = 0; j < num; ++j) {
      found[j] = table[block] * block_stride + place * slot_stride;
      if (++place == size) place = 0, ++block;
    }
  }
};

inline Blocks blocks_of(const AttentionArgs& a, int64_t request) {
  int64_t row = a.rows == nullptr ? request : a.rows[request];
  return {a.tables + row * a.table_stride, a.block_size, a.block_stride, a.slot_stride};
}

// ------------------------------------------------------------------------------ a single token

// What is known of all heads of a token: unscaled sums [H, padded D], maxima, weights.
struct State {
  float *sums, *most, *weight;
};

inline State state_at(const AttentionArgs& a, float* floats) {
  float* most = floats + a.heads * padded_head(a.head_dim);
  return {floats, most, most + a.heads};
}

// Products of a query with keys, in float32.
template <class T>
struct Query {
  static void take(const T* q, float* kept, int64_t size) {
    for (int64_t d = 0; d < padded_head(size); d += W)
      store(kept + d, d < size ? load_some(q + d, size - d) : F{});
  }

  template <int G>
  static inline void dots(const T* key, const float* kept, int64_t stride, int64_t size, F* dot) {
    for (int g = 0; g < G; ++g) dot[g] = F{};
    for (int64_t d = 0; d < size; d += W) {
      F x = load_some(key + d, size - d);
      for (int g = 0; g < G; ++g) dot[g] += x * load(kept + g * stride + d);
    }
  }
};

#if defined(__AVX512BF16__)
// By pairs: the query is kept as it is, twice as many numbers in a vector.
template <>
struct Query<B16> {
  static void take(const B16* q, float* kept, int64_t size) {
    std::memset(kept, 0, padded_head(size) * 4);
    std::memcpy(kept, q, size * 2);
  }

  static inline __m512bh pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }

  template <int G>
  static inline void dots(const B16* key, const float* kept, int64_t stride, int64_t size, F* dot) {
    __m512 sum[G];
    for (int g = 0; g < G; ++g) sum[g] = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; d += 2 * W) {
      __mmask32 mask = size - d >= 2 * W ? ~0u : (1u << (size - d)) - 1;
      __m512bh x = (__m512bh)_mm512_maskz_loadu_epi16(mask, key + d);
      for (int g = 0; g < G; ++g)
        sum[g] = _mm512_dpbf16_ps(sum[g], x, pairs(kept + g * stride + d / 2));
    }
    for (int g = 0; g < G; ++g) dot[g] = (F)sum[g];
  }
};
#endif

// scores[g][j] of G heads (1, 2 or 4) and all keys of a block. Keys behind the last one repeat it.
template <class T, int G>
inline void score(const AttentionArgs& a, const T* k, const int64_t* offsets, int64_t num,
                  const float* q, float* scores) {
  constexpr int AT_ONCE = W / G;
  int64_t stride = padded_head(a.head_dim);
  for (int64_t j = 0; j < num; j += AT_ONCE) {
    F dots[W], dot[G];
    for (int i = 0; i < AT_ONCE; ++i) {
      const T* key = k + offsets[least(j + i, num - 1)];
      Query<T>::template dots<G>(key, q, stride, a.head_dim, dot);
      for (int g = 0; g < G; ++g) dots[g * AT_ONCE + i] = dot[g];
    }
    float found[W];
    store(found, sums_of(dots) * float(a.scale));
    for (int g = 0; g < G; ++g)
      std::memcpy(scores + g * KEYS + j, found + g * AT_ONCE, sizeof(float) * AT_ONCE);
  }
  for (int g = 0; g < G; ++g)
    for (int64_t j = num; j < (num + W - 1) / W * W; ++j) scores[g * KEYS + j] = -__builtin_inff();
}

// Keys and values of the next block are asked for in the order in which they lie, a few lines with
// each key of this one: memory is fastest so, and more lines at once than it has room for are lost.
struct Ahead {
  const char *k, *v;
  const int64_t* offsets;              // of the next block's tokens, in numbers of `width` bytes
  int64_t num, width, bytes, share;    // tokens; bytes of all heads of a key; bytes at a time
  int64_t token, place;

  inline void some() {
    if (token >= num) return;
    const char* from = (place < bytes ? k + place : v + place - bytes) + offsets[token] * width;
    for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(from + i, 0, 2);
    place += share;
    if (place >= 2 * bytes) place = 0, ++token;
  }
};

// sums[g] = sums[g] * kept[g] + weights[g] * values, for N vectors of G heads.
template <class T, int G, int N, bool IS_WHOLE>
inline void gather(const T* v, const int64_t* offsets, int64_t num, const float* weights,
                   const float* kept, float* sums, int64_t stride, int64_t rest, Ahead& ahead) {
  F sum[G][N];
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) sum[g][n] = load(sums + g * stride + n * W) * kept[g];
  for (int64_t j = 0; j < num; ++j) {
    ahead.some();
    F x[N];
    for (int n = 0; n < N; ++n)
      x[n] = IS_WHOLE ? load(v + offsets[j] + n * W)
                      : load_some(v + offsets[j] + n * W, rest - n * W);
    for (int g = 0; g < G; ++g) {
      F weight = all(weights[g * KEYS + j]);
      for (int n = 0; n < N; ++n) sum[g][n] += weight * x[n];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) store(sums + g * stride + n * W, sum[g][n]);
}

template <class T, int G>
inline void gather_all(const AttentionArgs& a, const T* v, const int64_t* offsets, int64_t num,
                       const float* weights, const float* kept, float* sums, Ahead& ahead) {
  int64_t size = a.head_dim, stride = padded_head(size), d = 0;
  for (; d + NV * W <= size; d += NV * W)
    gather<T, G, NV, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
  if (NV > 3 && d + 3 * W <= size) {
    gather<T, G, 3, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
    d += 3 * W;
  } else if (NV > 2 && d + 2 * W <= size) {
    gather<T, G, 2, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
    d += 2 * W;
  }
  for (; d + W <= size; d += W)
    gather<T, G, 1, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
  if (d < size)
    gather<T, G, 1, false>(v + d, offsets, num, weights, kept, sums + d, stride, size - d, ahead);
}

// A block of keys for G heads of one KV head, from head `h` on.
template <class T, int G>
inline void see(const AttentionArgs& a, int64_t h, const T* k, const T* v, const int64_t* offsets,
                int64_t num, const float* q, State state, Ahead& ahead) {
  int64_t stride = padded_head(a.head_dim);
  float scores[G * KEYS], kept[G];
  score<T, G>(a, k, offsets, num, q + h * stride, scores);
  for (int g = 0; g < G; ++g) {
    F most = all(state.most[h + g]);
    for (int64_t j = 0; j < num; j += W) most = larger(load(scores + g * KEYS + j), most);
    float new_most = max_of(most);
    F weight = {};
    for (int64_t j = 0; j < num; j += W) {
      F p = exp_of(load(scores + g * KEYS + j) - new_most);
      weight += p;
      store(scores + g * KEYS + j, p);
    }
    kept[g] = exp_one(state.most[h + g] - new_most);
    state.weight[h + g] = state.weight[h + g] * kept[g] + sum_of(weight);
    state.most[h + g] = new_most;
  }
  gather_all<T, G>(a, v, offsets, num, scores, kept, state.sums + h * stride, ahead);
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
template <class T>
inline void fetch(const AttentionArgs& a, int64_t offset) {
  const int64_t bytes = ((a.kv_heads - 1) * a.head_stride + a.head_dim) * int64_t(sizeof(T));
  const char* k = (const char*)(static_cast<const T*>(a.k) + offset);
  const char* v = (const char*)(static_cast<const T*>(a.v) + offset);
  char sink = 0;
  for (int64_t i = 0; i < bytes; i += 64) sink ^= k[i];
  for (int64_t i = 0; i < bytes; i += 64) sink ^= v[i];
  asm volatile("" : : "r"(sink));
}

template <class T>
void one_token(const AttentionArgs& a, const AttentionItem& item, float* partials, float* scratch) {
  int64_t size = a.head_dim, stride = padded_head(size), group = a.heads / a.kv_heads;
  float* q = scratch;
  float* own = scratch + a.heads * stride;
  State state = state_at(a, item.partial < 0 ? own : partials + item.partial * partial_floats(a));
  std::memset(state.sums, 0, a.heads * stride * 4);
  const T* queries = static_cast<const T*>(a.q) + a.query_start[item.request] * a.q_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    state.most[h] = LOWEST, state.weight[h] = 0;
    Query<T>::take(queries + h * size, q + h * stride, size);
  }
  Blocks blocks = blocks_of(a, item.request);
  int64_t offsets[2][KEYS];
  int64_t num = least(KEYS, item.end - item.begin);
  blocks.offsets(item.begin, num, offsets[0]);
  for (int64_t j = 0; j < num; ++j) fetch<T>(a, offsets[0][j]);
  for (int64_t begin = item.begin, turn = 0; begin < item.end; begin += KEYS, turn ^= 1) {
    int64_t next = begin + KEYS, coming = next < item.end ? least(KEYS, item.end - next) : 0;
    blocks.offsets(next, coming, offsets[turn ^ 1]);
    const int64_t width = sizeof(T), bytes = a.kv_heads * size * width;
    Ahead ahead{(const char*)a.k, (const char*)a.v, offsets[turn ^ 1], coming, width, bytes,
                2 * size * width, 0, 0};
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const T* k = static_cast<const T*>(a.k) + head * a.head_stride;
      const T* v = static_cast<const T*>(a.v) + head * a.head_stride;
      int64_t h = head * group, end = h + group;
      for (; h + 4 <= end; h += 4) see<T, 4>(a, h, k, v, offsets[turn], num, q, state, ahead);
      if (h + 2 <= end) {
        see<T, 2>(a, h, k, v, offsets[turn], num, q, state, ahead);
        h += 2;
      }
      if (h < end) see<T, 1>(a, h, k, v, offsets[turn], num, q, state, ahead);
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

// ------------------------------------------------------------------------- tokens of a prompt

template <bool IS_PAIRS>
inline F add_product(F sum, U x, U y) {
#if defined(__AVX512BF16__)
  if (IS_PAIRS) return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#endif
  return sum + (F)x * (F)y;
}

// MR rows and N vectors of c (+)= a @ b; b is packed by rows of `columns` words.
template <bool IS_PAIRS, int N>
inline void corner(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t columns,
                   float* c, int64_t c_stride, int64_t depth, bool adds) {
  F sum[MR][N];
  for (int r = 0; r < MR; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = adds ? load(c + r * c_stride + n * W) : F{};
  for (int64_t i = 0; i < depth; ++i) {
    U y[N];
    for (int n = 0; n < N; ++n) std::memcpy(&y[n], b + i * columns + n * W, sizeof(U));
    for (int r = 0; r < MR; ++r) {
      U x = a[r * a_stride + i] + U{};
      for (int n = 0; n < N; ++n) sum[r][n] = add_product<IS_PAIRS>(sum[r][n], x, y[n]);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int n = 0; n < N; ++n) store(c + r * c_stride + n * W, sum[r][n]);
}

template <bool IS_PAIRS>
void product(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t columns,
             float* c, int64_t c_stride, int64_t width, int64_t depth, bool adds) {
  for (int64_t n = 0; n < width;) {
    bool is_wide = n + NV * W <= width;
    for (int64_t r = 0; r < rows; r += MR) {
      const uint32_t* x = a + r * a_stride;
      float* y = c + r * c_stride + n;
      if (is_wide) {
        corner<IS_PAIRS, NV>(x, a_stride, b + n, columns, y, c_stride, depth, adds);
      } else {
        corner<IS_PAIRS, 1>(x, a_stride, b + n, columns, y, c_stride, depth, adds);
      }
    }
    n += is_wide ? NV * W : W;
  }
}

inline int64_t rows_of_tile(const AttentionArgs& a) {
  int64_t group = a.heads / a.kv_heads, most = group > TILE_ROWS ? group : TILE_ROWS;
  return (most + MR - 1) / MR * MR;
}

// Where a thread keeps a tile of queries and a tile of keys.
struct Tile {
  uint32_t *q, *keys, *values, *weights;  // [R, words], [words, 64], [64 or 32, D], [R, 64]
  float *scores, *sums, *most, *weight;   // [R, 64], [R, D], [R], [R]
};

inline Tile tile_at(const AttentionArgs& a, float* scratch) {
  int64_t rows = rows_of_tile(a), size = padded_head(a.head_dim);
  Tile t;
  auto take = [&](int64_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  };
  t.q = (uint32_t*)take(rows * size);
  t.keys = (uint32_t*)take(TILE_KEYS * size);
  t.values = (uint32_t*)take(TILE_KEYS * size);
  t.weights = (uint32_t*)take(rows * TILE_KEYS);
  t.scores = take(rows * TILE_KEYS);
  t.sums = take(rows * size);
  t.most = take(rows);
  t.weight = take(rows);
  return t;
}

int64_t scratch_floats(const AttentionArgs& a) {
  int64_t rows = rows_of_tile(a), size = padded_head(a.head_dim);
  int64_t many = 2 * rows * (size + TILE_KEYS + 1) + 2 * TILE_KEYS * size;
  int64_t one = a.heads * size + partial_floats(a);
  return (many > one ? many : one) + 16;
}

// Words of a row of numbers: as they are, in pairs (size is even then), or as floats.
template <bool IS_PAIRS, class T>
inline void to_words(const T* from, uint32_t* to, int64_t size) {
  if (IS_PAIRS) {
    std::memcpy(to, from, size * sizeof(T));
    return;
  }
  for (int64_t d = 0; d < size; d += W)
    store_some((float*)to + d, load_some(from + d, size - d), size - d);
}

template <bool IS_PAIRS, class T>
void pack_keys(const AttentionArgs& a, const T* k, const int64_t* offsets, int64_t num,
               uint32_t* keys) {
  int64_t size = a.head_dim, words = IS_PAIRS ? size / 2 : size;
  uint32_t row[1024 + W];
  for (int64_t j = 0; j < TILE_KEYS; ++j) {
    if (j < num) {
      to_words<IS_PAIRS>(k + offsets[j], row, size);
    } else {
      std::memset(row, 0, words * 4);
    }
    for (int64_t i = 0; i < words; ++i) keys[i * TILE_KEYS + j] = row[i];
  }
}

template <bool IS_PAIRS, class T>
void pack_values(const AttentionArgs& a, const T* v, const int64_t* offsets, int64_t num,
                 uint32_t* values) {
  int64_t size = a.head_dim, stride = padded_head(size);
  if (!IS_PAIRS) {
    for (int64_t j = 0; j < TILE_KEYS; ++j)
      for (int64_t d = 0; d < size; d += W)
        store((float*)values + j * stride + d,
              j < num ? load_some(v + offsets[j] + d, size - d) : F{});
    return;
  }
  for (int64_t j = 0; j < TILE_KEYS; j += 2) {
    for (int64_t d = 0; d < size; d += W) {
      U low = j < num ? (U)load_some(v + offsets[j] + d, size - d) >> 16 : U{};
      U high = j + 1 < num ? (U)load_some(v + offsets[j + 1] + d, size - d) : U{};
      U both = low | high;
      std::memcpy(values + j / 2 * stride + d, &both, sizeof both);
    }
  }
}

// Scores of one row become weights; only keys [low, high) of the tile are seen by it.
template <bool IS_PAIRS>
inline void weigh(const Tile& t, int64_t row, int64_t low, int64_t high, float scale,
                  int64_t size) {
  float* scores = t.scores + row * TILE_KEYS;
  F most = all(t.most[row]), weight = {};
  I place;
  for (int j = 0; j < W; ++j) place[j] = j;
  for (int64_t j = 0; j < TILE_KEYS; j += W, place += W) {
    F x = load(scores + j) * scale;
    I is_seen = (place >= int32_t(low)) & (place < int32_t(high));
    x = is_seen ? x : all(-__builtin_inff());
    store(scores + j, x);
    most = larger(x, most);
  }
  float new_most = max_of(most), kept = exp_one(t.most[row] - new_most);
  for (int64_t j = 0; j < TILE_KEYS; j += W) {
    F p = exp_of(load(scores + j) - new_most);
    weight += p;
    if (IS_PAIRS) {
      store((B16*)(t.weights + row * TILE_KEYS) + j, p);
    } else {
      store((float*)(t.weights + row * TILE_KEYS) + j, p);
    }
  }
  t.weight[row] = t.weight[row] * kept + sum_of(weight);
  t.most[row] = new_most;
  if (kept == 1.0f) return;
  float* sums = t.sums + row * padded_head(size);
  for (int64_t d = 0; d < size; d += W) store(sums + d, load(sums + d) * kept);
}

template <bool IS_PAIRS, class T>
void some_tokens(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  int64_t size = a.head_dim, stride = padded_head(size), group = a.heads / a.kv_heads;
  int64_t words = IS_PAIRS ? size / 2 : size, width = (size + W - 1) / W * W;
  int64_t num_rows = (item.end - item.begin) * group, rows = (num_rows + MR - 1) / MR * MR;
  Tile t = tile_at(a, scratch);
  int64_t first = a.query_start[item.request];
  int64_t cached = a.seq_lens[item.request] - (a.query_start[item.request + 1] - first);
  std::memset(t.sums, 0, rows * stride * 4);
  std::memset(t.weights, 0, rows * TILE_KEYS * 4);
  std::memset(t.q + num_rows * stride, 0, (rows - num_rows) * stride * 4);
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* q = static_cast<const T*>(a.q) + (first + item.begin + r / group) * a.q_stride;
    to_words<IS_PAIRS>(q + (item.head * group + r % group) * size, t.q + r * stride, size);
    t.most[r] = LOWEST, t.weight[r] = 0;
  }
  const T* k = static_cast<const T*>(a.k) + item.head * a.head_stride;
  const T* v = static_cast<const T*>(a.v) + item.head * a.head_stride;
  Blocks blocks = blocks_of(a, item.request);
  int64_t end = cached + item.end, begin = cached + item.begin - a.window + 1;
  if (a.window == 0 || begin < 0) begin = 0;
  for (int64_t key = begin; key < end; key += TILE_KEYS) {
    int64_t num = least(TILE_KEYS, end - key), offsets[TILE_KEYS];
    blocks.offsets(key, num, offsets);
    pack_keys<IS_PAIRS>(a, k, offsets, num, t.keys);
    pack_values<IS_PAIRS>(a, v, offsets, num, t.values);
    product<IS_PAIRS>(rows, t.q, stride, t.keys, TILE_KEYS, t.scores, TILE_KEYS, TILE_KEYS, words,
                      false);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t high = cached + item.begin + r / group + 1 - key;
      int64_t low = a.window == 0 ? 0 : high - a.window;
      weigh<IS_PAIRS>(t, r, low < 0 ? 0 : low, least(high, num), float(a.scale), size);
    }
    product<IS_PAIRS>(rows, t.weights, TILE_KEYS, t.values, stride, t.sums, stride, width,
                      IS_PAIRS ? TILE_KEYS / 2 : TILE_KEYS, true);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    T* out = static_cast<T*>(a.out) + (first + item.begin + r / group) * a.out_stride;
    out += (item.head * group + r % group) * size;
    float scale = t.weight[r] == 0 ? 0.0f : 1.0f / t.weight[r];
    for (int64_t d = 0; d < size; d += W)
      store_some(out + d, load(t.sums + r * stride + d) * scale, size - d);
  }
}

// ---------------------------------------------------------------------------------- the table

void one(const AttentionArgs& a, const AttentionItem& item, float* partials, float* scratch) {
  if (a.dtype == 0) return one_token<float>(a, item, partials, scratch);
  one_token<B16>(a, item, partials, scratch);
}

void merge(const AttentionArgs& a, int64_t request, const float* partials, int64_t count) {
  if (a.dtype == 0) return merge_parts<float>(a, request, partials, count);
  merge_parts<B16>(a, request, partials, count);
}

void many(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  if (a.dtype == 0) return some_tokens<false, float>(a, item, scratch);
#if defined(__AVX512BF16__)
  if (a.head_dim % 2 == 0) return some_tokens<true, B16>(a, item, scratch);
#endif
  some_tokens<false, B16>(a, item, scratch);
}

constexpr AttentionVariant functions = {scratch_floats, one, merge, many};

}  // namespace
