// How is a query multiplied with keys as they lie in the cache? Numbers, pairs, or codes of 8 bits.
//
// Included by one file for each variant; see elementwise_wide.h. `take` keeps a query in
// padded_head floats, `dots` gives the sums of each lane for one key and G queries.
#pragma once

#include "attention_cache.h"

namespace {

// Products of a query with keys, in float32.
template <class T, class C>
struct Query {
  static void take(const T* q, float* kept, int64_t size) {
    for (int64_t d = 0; d < padded_head(size); d += W)
      store(kept + d, d < size ? load_some(q + d, size - d) : F{});
  }

  template <int G>
  static inline void dots(const C* key, const float* kept, int64_t stride, int64_t size, F* dot) {
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
struct Query<B16, B16> {
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

#if defined(__AVX512VNNI__)
// Whole numbers times codes, 64 at once, without an error. A query becomes numbers of 16 bits: their
// high bytes, then the low ones, both signed, each padded_head of them; the last two floats are what
// is taken off each lane, and the scale. The instruction wants codes unsigned, so that 128 is added
// to them: 128 times the sum of the query too much. Up to 1024 numbers a head, no lane leaves 31
// bits.
template <class T>
struct Query<T, I8> {
  static constexpr float MOST = 127 * 256 + 127, TINY = 1e-30f;

  static void take(const T* q, float* kept, int64_t size) {
    int64_t padded = padded_head(size);
    int8_t *high = reinterpret_cast<int8_t*>(kept), *low = high + padded;
    F largest = {}, broken = {};
    for (int64_t d = 0; d < size; d += W) {
      F x = load_some(q + d, size - d);
      largest = larger(magnitude(x), largest);
      broken += x - x;  // NaN if there is one, or an infinity
    }
    float scale = max_of(largest) / MOST, inverse = scale > TINY ? 1.0f / scale : 0.0f;
    F sum = {};
    for (int64_t d = 0; d < padded; d += W) {
      F x = d < size ? load_some(q + d, size - d) * inverse : F{};
      I whole = near(x), low_digits = whole << 24 >> 24;
      store_bytes(low + d, low_digits);
      store_bytes(high + d, (whole - low_digits) >> 8);
      sum += __builtin_convertvector(whole, F);
    }
    scale += sum_of(broken);
    kept[padded - 2] = 128.0f / W * sum_of(sum) * scale;
    kept[padded - 1] = scale;
  }

  template <int G>
  static inline void dots(const I8* key, const float* kept, int64_t stride, int64_t size, F* dot) {
    __m512i high[G], low[G];
    for (int g = 0; g < G; ++g) high[g] = low[g] = _mm512_setzero_si512();
    for (int64_t d = 0; d < size; d += 64) {
      __m512i x = _mm512_xor_si512(codes_of(key + d, size - d), _mm512_set1_epi8(-128));
      for (int g = 0; g < G; ++g) {
        const char* q = reinterpret_cast<const char*>(kept + g * stride) + d;
        high[g] = _mm512_dpbusd_epi32(high[g], x, _mm512_loadu_si512(q));
        low[g] = _mm512_dpbusd_epi32(low[g], x, _mm512_loadu_si512(q + stride));
      }
    }
    for (int g = 0; g < G; ++g) {
      F sum = __builtin_convertvector(((I)high[g] << 8) + (I)low[g], F);
      dot[g] = sum * kept[(g + 1) * stride - 1] - kept[(g + 1) * stride - 2];
    }
  }
};
#endif

}  // namespace
