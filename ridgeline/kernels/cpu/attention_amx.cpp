// Attention of prompts with AMX tiles; single tokens as with AVX-512 BF16.
//
// 128 rows (new tokens times heads of a KV head) by 64 keys at a time: scores are products of
// tiles, weights are computed row by row, sums are products of tiles again. Heads are filled up to
// 32 numbers. Codes and e4m3 are exact in bfloat16: scales come to scores and weights. Codes of 4
// bits are unpacked first.
#include <immintrin.h>

#include "attention.h"
#include "attention_cache.h"
#include "tiles.h"

namespace {

constexpr int64_t EDGE = 16;  // rows of a tile
constexpr int64_t PAIRS = TILE_KEYS / 2;
constexpr float LOWEST = -1e30f;  // a maximum before anything is seen
static_assert(TILE_KEYS == 64, "a row of scores is four vectors");

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

struct TiledPrompt {
  int64_t rows, words, width;  // of a tile of queries; of a head: pairs and floats
  uint32_t *q, *keys, *values, *weights;  // [R, words], [words, 64], [32, width], [R, 32]
  float *scores, *sums, *most, *weight;   // [R, 64], [R, width], [R], [R]
  // Of packed codes: sums of a query's numbers and of weighted lows, [R] each; [2, 64, D] unpacked.
  float *all, *low;
  I8* unpacked;
};

inline int64_t most_rows(const AttentionArgs& a) {
  int64_t group = a.heads / a.kv_heads;
  return round_up(group > TILE_ROWS ? group : TILE_ROWS, EDGE);
}

inline int64_t prompt_floats(const AttentionArgs& a) {
  int64_t width = round_up(a.head_dim, 32), words = width / 2;
  int64_t a_row = words + PAIRS + TILE_KEYS + width + 4;
  int64_t unpacked = a.kv_dtype == RL_I4 ? TILE_KEYS * a.head_dim / 2 : 0;
  return most_rows(a) * a_row + TILE_KEYS * words + PAIRS * width + unpacked + 16;
}

TiledPrompt prompt_at(const AttentionArgs& a, int64_t rows, float* scratch) {
  TiledPrompt t{};
  t.rows = rows, t.width = round_up(a.head_dim, 32), t.words = t.width / 2;
  scratch = reinterpret_cast<float*>(round_up(reinterpret_cast<int64_t>(scratch), 64));
  auto take = [&](int64_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  };
  auto words = [&](int64_t count) { return reinterpret_cast<uint32_t*>(take(count)); };
  t.q = words(rows * t.words);
  t.keys = words(TILE_KEYS * t.words);
  t.values = words(PAIRS * t.width);
  t.weights = words(rows * PAIRS);
  t.scores = take(rows * TILE_KEYS);
  t.sums = take(rows * t.width);
  t.most = take(rows);
  t.weight = take(rows);
  t.all = take(rows);
  t.low = take(rows);
  t.unpacked = reinterpret_cast<I8*>(take(0));  // the last
  return t;
}

// c [rows, columns] (+)= a [rows, depth] by b [depth, columns], all words; rows and depth are whole
// tiles, columns pairs of them. `a` and c are rows of `a_words` and `columns`.
template <bool ADDS>
void tile_words(int64_t rows, const uint32_t* a, int64_t a_words, const uint32_t* b,
                int64_t columns, int64_t depth, float* c) {
  int64_t a_step = a_words * 4, step = columns * 4;
  for (int64_t r = 0; r < rows; r += 2 * EDGE) {
    bool two = r + EDGE < rows;
    for (int64_t n = 0; n < columns; n += 2 * EDGE) {
      float *top = c + r * columns + n, *low = top + EDGE * columns;
      if (ADDS) {
        TILE_LOAD(0, top, step);
        TILE_LOAD(1, top + EDGE, step);
        if (two) TILE_LOAD(2, low, step);
        if (two) TILE_LOAD(3, low + EDGE, step);
      } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
      }
      for (int64_t k = 0; k < depth; k += EDGE) {
        TILE_LOAD(4, a + r * a_words + k, a_step);
        TILE_LOAD(6, b + k * columns + n, step);
        TILE_LOAD(7, b + k * columns + n + EDGE, step);
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        if (!two) continue;
        TILE_LOAD(5, a + (r + EDGE) * a_words + k, a_step);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
      }
      TILE_STORE(0, top, step);
      TILE_STORE(1, top + EDGE, step);
      if (two) TILE_STORE(2, low, step);
      if (two) TILE_STORE(3, low + EDGE, step);
    }
  }
}

inline __mmask16 first_of(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1 << count) - 1);
}

// Columns of 16 rows of words: rows[i] becomes column i.
inline void turn(__m512i (&rows)[16]) {
  __m512i half[16];
  for (int i = 0; i < 16; i += 2) {
    half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    half[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    half[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    half[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    half[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
  }
}

// Keys or values of a head, and where they are: bfloat16, e4m3, or codes with scales.
struct Numbers {
  const bf16* numbers;
  const I8* codes;  // but for one of the four all are null
  const E4m3* narrow;
  const I4* packed;
  const uint16_t *scales, *lows;  // float16, of codes
};

// 32 numbers as pairs of bfloat16, zeros from `count` on.
inline __m512i pairs_of(const Numbers& from, int64_t at, int64_t count) {
  __mmask32 mask = count >= 32 ? __mmask32(~0u) : count <= 0 ? 0 : __mmask32((1u << count) - 1);
  if (from.numbers) return _mm512_maskz_loadu_epi16(mask, from.numbers + at);
  if (from.narrow) {
    F first = load_some(from.narrow + at, count < 0 ? 0 : count);
    F second = count > 16 ? load_some(from.narrow + at + 16, count - 16) : F{};
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }
  __m256i codes = _mm256_maskz_loadu_epi8(mask, from.codes + at);
  __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes));
  __m512i high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

// Pairs of a key as a column; zeros where there is no key and behind the head.
void rotate_keys(const AttentionArgs& a, const Numbers& k, const int64_t* offsets, int64_t num,
               const TiledPrompt& t) {
  for (int64_t j = 0; j < TILE_KEYS; j += 16) {
    for (int64_t d = 0; d < t.words; d += 16) {
      __m512i rows[16];
      for (int64_t i = 0; i < 16; ++i)
        rows[i] = j + i < num ? pairs_of(k, offsets[j + i] + 2 * d, a.head_dim - 2 * d)
                              : _mm512_setzero_si512();
      turn(rows);
      for (int64_t i = 0; i < 16; ++i)
        _mm512_storeu_si512(t.keys + (d + i) * TILE_KEYS + j, rows[i]);
    }
  }
}

// Two neighbouring values side by side.
void pair_values(const AttentionArgs& a, const Numbers& v, const int64_t* offsets, int64_t num,
                 const TiledPrompt& t) {
  // of 32 numbers of each of two rows: number i of the one, then of the other
  __m512i low, high;
  uint16_t order[64];
  for (uint16_t i = 0; i < 64; ++i) order[i] = uint16_t(i / 2 + i % 2 * 32);
  std::memcpy(&low, order, 64);
  std::memcpy(&high, order + 32, 64);
  for (int64_t j = 0; j < TILE_KEYS; j += 2)
    for (int64_t d = 0; d < t.width; d += 32) {
      __m512i zero = _mm512_setzero_si512(), x = zero, y = zero;
      if (j < num) x = pairs_of(v, offsets[j] + d, a.head_dim - d);
      if (j + 1 < num) y = pairs_of(v, offsets[j + 1] + d, a.head_dim - d);
      uint32_t* to = t.values + j / 2 * t.width + d;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
    }
}

// Keys [low, high) whose values are not all numbers: their exponents are all ones.
KeySet keys_without_numbers(const AttentionArgs& a, const Numbers& v, const int64_t* offsets,
                            int64_t low, int64_t high) {
  const __m512i ones = _mm512_set1_epi16(0x7f80);
  KeySet found = 0;
  for (int64_t j = low < 0 ? 0 : low; j < high; ++j)
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      __m512i exponents = _mm512_and_si512(pairs_of(v, offsets[j] + d, a.head_dim - d), ones);
      if (_mm512_cmpeq_epi16_mask(exponents, ones)) found |= KeySet(1) << j;
    }
  return found;
}

void clear_values(KeySet keys, const TiledPrompt& t) {
  for (int64_t j = 0; j < TILE_KEYS; ++j) {
    if (!(keys >> j & 1)) continue;
    uint32_t kept = j % 2 ? 0x0000ffffu : 0xffff0000u;
    uint32_t* row = t.values + j / 2 * t.width;
    for (int64_t d = 0; d < t.width; ++d) row[d] &= kept;
  }
}

struct Scales {
  float k[TILE_KEYS], v[TILE_KEYS], k_low[TILE_KEYS], v_low[TILE_KEYS];
};

void all_scales(const uint16_t* scales, const int64_t* places, int64_t num, float* taken) {
  for (int64_t j = 0; j < TILE_KEYS; j += 16) {
    uint16_t some[16] = {};
    for (int64_t i = j; i < num && i < j + 16; ++i) some[i - j] = scales[places[i]];
    __m256i halves;
    std::memcpy(&halves, some, sizeof halves);
    _mm512_storeu_ps(taken + j, _mm512_cvtph_ps(halves));
  }
}

// Lows as unpacked codes want them.
void all_lows(const uint16_t* lows, const float* scales, const int64_t* places, int64_t num,
              float* taken) {
  all_scales(lows, places, num, taken);
  for (int64_t j = 0; j < TILE_KEYS; ++j) taken[j] += scales[j] * float(MIDDLE);
}

// 2^x for x <= 0, within a few ulp; 0 below -125, and no product that is too small for a normal
// number: such ones cost a hundred cycles.
inline __m512 power_of_two(__m512 x) {
  __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  x = _mm512_maskz_mov_ps(counts, x);
  __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.540353e-4f);  // ln 2 ^ i / i!
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

// Scores of one row become weights; only keys [low, high) of the tile are seen by it. `scale` is
// that of the scores times log2(e), so that weights are powers of two.
template <bool LOWS>
inline void weigh_row(const TiledPrompt& t, const Scales* scales, int64_t row, int64_t low,
                      int64_t high, float scale) {
  const float* scores = t.scores + row * TILE_KEYS;
  __m512 x[4], factor = _mm512_set1_ps(scale), never = _mm512_set1_ps(-__builtin_inff());
  bool sees_all = low <= 0 && high >= TILE_KEYS;
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), factor);
    if (scales) x[i] = _mm512_mul_ps(x[i], _mm512_loadu_ps(scales->k + 16 * i));
    if (LOWS)
      x[i] = _mm512_fmadd_ps(_mm512_loadu_ps(scales->k_low + 16 * i),
                             _mm512_set1_ps(t.all[row] * scale), x[i]);
    if (sees_all) continue;
    __mmask16 seen = first_of(high - 16 * i) & __mmask16(~first_of(low - 16 * i));
    x[i] = _mm512_mask_blend_ps(seen, never, x[i]);
  }
  __m512 most_of = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  float before = t.most[row], most = _mm512_reduce_max_ps(most_of);
  if (!(most > before)) most = most != most ? most : before;
  __m512 peak = _mm512_set1_ps(most);
  for (int i = 0; i < 4; ++i) x[i] = power_of_two(_mm512_sub_ps(x[i], peak));
  float weight = _mm512_reduce_add_ps(
      _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
  __m512 lows = _mm512_setzero_ps();
  for (int i = 0; LOWS && i < 4; ++i)
    lows = _mm512_fmadd_ps(x[i], _mm512_loadu_ps(scales->v_low + 16 * i), lows);
  for (int i = 0; scales && i < 4; ++i)
    x[i] = _mm512_mul_ps(x[i], _mm512_loadu_ps(scales->v + 16 * i));
  uint32_t* weights = t.weights + row * PAIRS;
  _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
  _mm512_storeu_si512(weights + 16, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
  t.most[row] = most;
  if (most == before) {
    t.weight[row] += weight;
    if (LOWS) t.low[row] += _mm512_reduce_add_ps(lows);
    return;
  }
  __m512 kept = power_of_two(_mm512_set1_ps(before - most));
  t.weight[row] = t.weight[row] * _mm512_cvtss_f32(kept) + weight;
  if (LOWS) t.low[row] = t.low[row] * _mm512_cvtss_f32(kept) + _mm512_reduce_add_ps(lows);
  float* sums = t.sums + row * t.width;
  for (int64_t d = 0; d < t.width; d += 16)
    _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), kept));
}

Numbers numbers_of(const AttentionArgs& a, const void* cache, const uint16_t* scales,
                   const uint16_t* lows, int64_t head) {
  int64_t at = head * a.head_stride, scale = head * a.scale_head_stride;
  Numbers found{};
  if (a.kv_dtype == RL_BF16) found.numbers = static_cast<const bf16*>(cache) + at;
  if (a.kv_dtype == RL_E4M3) found.narrow = static_cast<const E4m3*>(cache) + at;
  if (a.kv_dtype == RL_I8) found.codes = static_cast<const I8*>(cache) + at;
  if (a.kv_dtype == RL_I4) found.packed = static_cast<const I4*>(cache) + at;
  if (found.codes || found.packed) found.scales = scales + scale;
  if (found.packed) found.lows = lows + scale;
  return found;
}

// Packed codes of these places, side by side in `to`.
void unpack_all(const AttentionArgs& a, Numbers& from, const int64_t* offsets, int64_t num,
                I8* to) {
  for (int64_t j = 0; j < num; ++j)
    unpack(from.packed + offsets[j], to + j * a.head_dim, a.head_dim);
  from.codes = to;
}

void tiled_tokens(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  int64_t group = a.heads / a.kv_heads, num_rows = (item.end - item.begin) * group;
  TiledPrompt t = prompt_at(a, round_up(num_rows, EDGE), scratch);
  int64_t first = a.query_start[item.request];
  int64_t cached = a.seq_lens[item.request] - (a.query_start[item.request + 1] - first);
  std::memset(t.q, 0, t.rows * t.words * 4);
  std::memset(t.weights, 0, t.rows * PAIRS * 4);
  std::memset(t.sums, 0, t.rows * t.width * 4);
  for (int64_t r = 0; r < num_rows; ++r) {
    const bf16* q = static_cast<const bf16*>(a.q) + (first + item.begin + r / group) * a.q_stride;
    q += (item.head * group + r % group) * a.head_dim;
    t.most[r] = LOWEST, t.weight[r] = t.low[r] = 0;
    if (a.kv_dtype != RL_I4) {
      std::memcpy(t.q + r * t.words, q, a.head_dim * sizeof(bf16));
      continue;
    }
    float turned[1024];
    t.all[r] = rotate_query(reinterpret_cast<const B16*>(q), turned, a.head_dim);
    B16* kept = reinterpret_cast<B16*>(t.q + r * t.words);
    for (int64_t d = 0; d < a.head_dim; d += W) store(kept + d, load(turned + d));
  }
  Numbers k = numbers_of(a, a.k, a.k_scales, a.k_lows, item.head);
  Numbers v = numbers_of(a, a.v, a.v_scales, a.v_lows, item.head);
  Scales scales;
  float scale = float(a.scale) * 1.44269504f;
  const int32_t* table = a.tables + (a.rows ? a.rows[item.request] : item.request) * a.table_stride;
  int64_t end = cached + item.end, begin = cached + item.begin - a.window + 1;
  if (a.window == 0 || begin < 0) begin = 0;
  TileConfig config = tile_config(int(EDGE));
  TILE_CONFIGURE(config);
  for (int64_t key = begin; key < end; key += TILE_KEYS) {
    int64_t num = end - key < TILE_KEYS ? end - key : TILE_KEYS;
    int64_t offsets[TILE_KEYS], scale_offsets[TILE_KEYS];
    for (int64_t j = 0; j < num; ++j) {
      int64_t place = (key + j) / a.block_size, slot = (key + j) % a.block_size;
      int64_t block = place < a.table_width ? table[place] : 0;
      offsets[j] = block * a.block_stride + slot * a.slot_stride;
      scale_offsets[j] = block * a.scale_block_stride + slot * a.scale_slot_stride;
    }
    if (k.scales) {
      all_scales(k.scales, scale_offsets, num, scales.k);
      all_scales(v.scales, scale_offsets, num, scales.v);
    }
    if (k.packed) {
      all_lows(k.lows, scales.k, scale_offsets, num, scales.k_low);
      all_lows(v.lows, scales.v, scale_offsets, num, scales.v_low);
      unpack_all(a, k, offsets, num, t.unpacked);
      unpack_all(a, v, offsets, num, t.unpacked + TILE_KEYS * a.head_dim);
      for (int64_t j = 0; j < num; ++j) offsets[j] = j * a.head_dim;
    }
    rotate_keys(a, k, offsets, num, t);
    pair_values(a, v, offsets, num, t);
    // What the first row does not see weighs 0 there, and 0 times NaN would be in its sum.
    int64_t known = cached + item.begin + 1 - key;
    KeySet wrong = keys_without_numbers(a, v, offsets, known, num);
    for (int64_t j = known < 0 ? 0 : known; v.scales && j < num; ++j) {
      if (is_number(scales.v[j]) && (!v.packed || is_number(scales.v_low[j]))) continue;
      wrong |= KeySet(1) << j;
      scales.v[j] = scales.v_low[j] = 0;
    }
    if (wrong) clear_values(wrong, t);
    tile_words<false>(t.rows, t.q, t.words, t.keys, TILE_KEYS, t.words, t.scores);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t high = cached + item.begin + r / group + 1 - key;
      int64_t low = a.window == 0 ? 0 : high - a.window;
      if (high > num) high = num;
      k.packed ? weigh_row<true>(t, &scales, r, low, high, scale)
               : weigh_row<false>(t, k.scales ? &scales : nullptr, r, low, high, scale);
      if (wrong & keys_between(low, high)) t.weight[r] = __builtin_nanf("");
    }
    tile_words<true>(t.rows, t.weights, PAIRS, t.values, t.width, PAIRS, t.sums);
  }
  TILE_RELEASE();
  for (int64_t r = 0; r < num_rows; ++r) {
    bf16* out = static_cast<bf16*>(a.out) + (first + item.begin + r / group) * a.out_stride;
    out += (item.head * group + r % group) * a.head_dim;
    int64_t h = item.head * group + r % group;
    float most = t.most[r] * 0.69314718f;  // of scores times log2(e)
    __m512 inverse = _mm512_set1_ps(share_of(a, h, most, t.weight[r]));
    for (int64_t d = 0; d < a.head_dim; d += 16) {
      __m512 y = _mm512_loadu_ps(t.sums + r * t.width + d);
      if (k.packed) y = _mm512_add_ps(y, _mm512_set1_ps(t.low[r]));
      y = _mm512_mul_ps(y, inverse);
      _mm256_mask_storeu_epi16(out + d, first_of(a.head_dim - d), (__m256i)_mm512_cvtneps_pbh(y));
    }
  }
}

bool takes(const AttentionArgs& a) {
  return a.dtype == RL_BF16 && a.kv_dtype != RL_F32 && a.head_dim % 2 == 0 && !a.cap;
}

int64_t tiled_scratch(const AttentionArgs& a) {
  int64_t vectors = attention_bf16()->scratch_floats(a), tiles = prompt_floats(a);
  return tiles > vectors ? tiles : vectors;
}

void tiled_few(const AttentionArgs& a, const AttentionItem& item, float* partials, float* scratch) {
  attention_bf16()->few(a, item, partials, scratch);
}

void tiled_merge(const AttentionArgs& a, int64_t token, const float* partials, int64_t count) {
  attention_bf16()->merge(a, token, partials, count);
}

void tiled_many(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  takes(a) ? tiled_tokens(a, item, scratch) : attention_bf16()->many(a, item, scratch);
}

constexpr AttentionVariant tiled = {tiled_scratch, tiled_few, tiled_merge, tiled_many};

}  // namespace

const AttentionVariant* attention_amx() { return &tiled; }
