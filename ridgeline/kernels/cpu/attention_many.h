// How do tokens of a prompt look at the keys before them? As rows of two small products, for which
// keys are packed by columns, and with AVX-512 BF16 in pairs. Words are 32 bits: one float, or a
// pair of bfloat16.
//
// Included by one file for each variant; see elementwise_wide.h. T is what queries and answers are
// made of, C what the cache is.
#include "attention_one.h"

namespace {

constexpr int MR = 6;  // rows of a product that are in registers, with NV vectors of columns

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
  // Of packed codes: sums of a query's numbers and of weighted lows, [R] each; [2, 64, D] unpacked.
  float *all, *low;
  I8* unpacked;
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
  t.all = take(rows);
  t.low = take(rows);
  t.unpacked = (I8*)take(a.kv_dtype == RL_I4 ? TILE_KEYS * size / 2 : 0);
  return t;
}

int64_t scratch_floats(const AttentionArgs& a) {
  int64_t rows = rows_of_tile(a), size = padded_head(a.head_dim);
  int64_t many = 2 * rows * (size + TILE_KEYS + 2) + 2 * TILE_KEYS * size;
  if (a.kv_dtype == RL_I4) many += TILE_KEYS * size / 2;
  int64_t tokens = most_tokens(a);
  int64_t few = tokens * (a.heads * size + partial_floats(a)) + packed_floats(a, tokens);
  return ((many > few ? many : few) + 31) / 16 * 16;
}

// Words of a row of numbers: pairs of bfloat16 (size is even then), or floats.
template <bool IS_PAIRS, class C>
inline void to_words(const C* from, uint32_t* to, int64_t size) {
  if (IS_PAIRS && sizeof(C) == sizeof(B16)) {
    std::memcpy(to, from, size * sizeof(C));
    return;
  }
  for (int64_t d = 0; d < size; d += W) {
    F x = load_some(from + d, size - d);
    if (IS_PAIRS) {
      store_some((B16*)to + d, x, size - d);
    } else {
      store_some((float*)to + d, x, size - d);
    }
  }
}

template <bool IS_PAIRS, class C>
void pack_keys(const AttentionArgs& a, const C* k, const int64_t* offsets, int64_t num,
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

template <bool IS_PAIRS, class C>
void pack_values(const AttentionArgs& a, const C* v, const int64_t* offsets, int64_t num,
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

// Keys [low, high) whose values are not all numbers.
template <class C>
KeySet keys_without_numbers(const C* v, const int64_t* offsets, int64_t low, int64_t high,
                            int64_t size) {
  KeySet found = 0;
  for (int64_t j = low < 0 ? 0 : low; j < high; ++j) {
    F wrong = {};
    for (int64_t d = 0; d < size; d += W) {
      F x = load_some(v + offsets[j] + d, size - d);
      wrong += x - x;
    }
    if (sum_of(wrong) != 0.0f) found |= KeySet(1) << j;
  }
  return found;
}

template <bool IS_PAIRS>
void clear_values(KeySet keys, int64_t stride, uint32_t* values) {
  for (int64_t j = 0; j < TILE_KEYS; ++j) {
    if (!(keys >> j & 1)) continue;
    if (IS_PAIRS) {
      uint16_t* row = (uint16_t*)(values + j / 2 * stride);
      for (int64_t d = 0; d < stride; ++d) row[2 * d + j % 2] = 0;
    } else {
      std::memset(values + j * stride, 0, stride * 4);
    }
  }
}

// What numbers of keys and of values are multiplied by, if they have scales.
struct TileScales {
  float k[TILE_KEYS], v[TILE_KEYS], k_low[TILE_KEYS], v_low[TILE_KEYS];
};

// Scores of one row become weights; only keys [low, high) of the tile are seen by it.
template <bool IS_PAIRS, bool SCALED, bool LOWS>
inline void weigh(const Tile& t, const TileScales& scales, int64_t row, int64_t low, int64_t high,
                  float scale, float cap, int64_t size) {
  float* scores = t.scores + row * TILE_KEYS;
  F most = all(t.most[row]), weight = {}, low_sum = {};
  I place;
  for (int j = 0; j < W; ++j) place[j] = j;
  for (int64_t j = 0; j < TILE_KEYS; j += W, place += W) {
    F x = load(scores + j) * scale;
    if (SCALED) x *= load(scales.k + j);
    if (LOWS) x += load(scales.k_low + j) * (t.all[row] * scale);
    if (cap) x = capped(x, cap);
    I is_seen = (place >= int32_t(low)) & (place < int32_t(high));
    x = is_seen ? x : all(-__builtin_inff());
    store(scores + j, x);
    most = larger(x, most);
  }
  float new_most = max_of(most), kept = exp_one(t.most[row] - new_most);
  for (int64_t j = 0; j < TILE_KEYS; j += W) {
    F p = exp_of(load(scores + j) - new_most);
    weight += p;
    if (LOWS) low_sum += p * load(scales.v_low + j);
    if (SCALED) p *= load(scales.v + j);
    if (IS_PAIRS) {
      store((B16*)(t.weights + row * TILE_KEYS) + j, p);
    } else {
      store((float*)(t.weights + row * TILE_KEYS) + j, p);
    }
  }
  t.weight[row] = t.weight[row] * kept + sum_of(weight);
  if (LOWS) t.low[row] = t.low[row] * kept + sum_of(low_sum);
  t.most[row] = new_most;
  if (kept == 1.0f) return;
  float* sums = t.sums + row * padded_head(size);
  for (int64_t d = 0; d < size; d += W) store(sums + d, load(sums + d) * kept);
}

template <bool IS_PAIRS, class T, class C>
void some_tokens(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  using K = typename Worked<C>::type;
  constexpr bool LOWS = IS_PACKED<C>;
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
    q += (item.head * group + r % group) * size;
    t.most[r] = LOWEST, t.weight[r] = t.low[r] = 0;
    if constexpr (LOWS) {
      float turned[1024];
      t.all[r] = rotate_query(q, turned, size);
      to_words<IS_PAIRS>(turned, t.q + r * stride, size);
    } else {
      to_words<IS_PAIRS>(q, t.q + r * stride, size);
    }
  }
  const C* k = static_cast<const C*>(a.k) + item.head * a.head_stride;
  const C* v = static_cast<const C*>(a.v) + item.head * a.head_stride;
  Blocks blocks = blocks_of(a, item.request), scale_blocks = scales_of(a, item.request);
  TileScales scales = {};
  int64_t end = cached + item.end, begin = cached + item.begin - a.window + 1;
  if (a.window == 0 || begin < 0) begin = 0;
  for (int64_t key = begin; key < end; key += TILE_KEYS) {
    int64_t num = least(TILE_KEYS, end - key), offsets[TILE_KEYS];
    blocks.offsets(key, num, offsets);
    const K *its_k, *its_v;
    if constexpr (LOWS) {
      for (int64_t j = 0; j < num; ++j) {
        unpack(k + offsets[j], t.unpacked + j * size, size);
        unpack(v + offsets[j], t.unpacked + (TILE_KEYS + j) * size, size);
        offsets[j] = j * size;
      }
      its_k = t.unpacked, its_v = t.unpacked + TILE_KEYS * size;
    } else {
      its_k = k, its_v = v;
    }
    pack_keys<IS_PAIRS>(a, its_k, offsets, num, t.keys);
    pack_values<IS_PAIRS>(a, its_v, offsets, num, t.values);
    // What the first row does not see weighs 0 there, and 0 times NaN would be in its sum.
    int64_t known = cached + item.begin + 1 - key;
    KeySet wrong = keys_without_numbers(its_v, offsets, known, num, size);
    const int64_t scale = item.head * a.scale_head_stride;
    if (HAS_SCALES<C>) {
      scale_blocks.offsets(key, num, offsets);
      take_scales(a.k_scales + scale, offsets, num, scales.k);
      take_scales(a.v_scales + scale, offsets, num, scales.v);
    }
    if (LOWS) {
      take_lows(a.k_lows + scale, scales.k, offsets, num, scales.k_low);
      take_lows(a.v_lows + scale, scales.v, offsets, num, scales.v_low);
    }
    for (int64_t j = known < 0 ? 0 : known; HAS_SCALES<C> && j < num; ++j) {
      if (is_number(scales.v[j]) && (!LOWS || is_number(scales.v_low[j]))) continue;
      wrong |= KeySet(1) << j;
      scales.v[j] = scales.v_low[j] = 0;
    }
    if (wrong) clear_values<IS_PAIRS>(wrong, stride, t.values);
    product<IS_PAIRS>(rows, t.q, stride, t.keys, TILE_KEYS, t.scores, TILE_KEYS, TILE_KEYS, words,
                      false);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t high = cached + item.begin + r / group + 1 - key;
      int64_t low = a.window == 0 ? 0 : high - a.window;
      weigh<IS_PAIRS, HAS_SCALES<C>, LOWS>(t, scales, r, low < 0 ? 0 : low, least(high, num),
                                     float(a.scale), float(a.cap), size);
      if (wrong & keys_between(low, high)) t.weight[r] = __builtin_nanf("");
    }
    product<IS_PAIRS>(rows, t.weights, TILE_KEYS, t.values, stride, t.sums, stride, width,
                      IS_PAIRS ? TILE_KEYS / 2 : TILE_KEYS, true);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    T* out = static_cast<T*>(a.out) + (first + item.begin + r / group) * a.out_stride;
    out += (item.head * group + r % group) * size;
    int64_t h = item.head * group + r % group;
    float scale = share_of(a, h, t.most[r], t.weight[r]), low = LOWS ? t.low[r] : 0.0f;
    for (int64_t d = 0; d < size; d += W)
      store_some(out + d, (load(t.sums + r * stride + d) + low) * scale, size - d);
  }
}

}  // namespace
