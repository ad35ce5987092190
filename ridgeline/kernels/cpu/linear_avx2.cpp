// Linear layers with AVX2 and FMA.
#include <immintrin.h>

#include "linear.h"

namespace {

struct Ops {
  static constexpr int MAX1 = 5, MAX2 = 2;
  static constexpr int CHAINS = 4, FEW1 = 5, FEW2 = 1, FEW_PAIRED = 0;
  static constexpr bool BIASED8 = false;

  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  using Raw = I;

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static void store(float* out, F v) {
    _mm256_store_ps(out, v.a);
    _mm256_store_ps(out + 8, v.b);
  }
  static Raw raw(const char* line) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(line)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32))};
  }
  static __m256 wide(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static F load_bf16(const bf16* from) {
    return {wide(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            wide(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
  }
  static F load_scales(const void* scales, int64_t at, int dtype) {
    if (dtype == RL_S_F32) {
      const float* from = static_cast<const float*>(scales) + at;
      return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
    }
    const bf16* from = static_cast<const bf16*>(scales) + at;
    if (dtype == RL_S_BF16) return load_bf16(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
  }
  static I load_zeros(const uint8_t* from) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  static I times(I x, int32_t y) {
    __m256i factor = _mm256_set1_epi32(y);
    return {_mm256_mullo_epi32(x.a, factor), _mm256_mullo_epi32(x.b, factor)};
  }
  static void accumulate(float* out, I dots, F scale, float x_scale) {
    __m256 factor = _mm256_set1_ps(x_scale);
    __m256 a = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots.a), _mm256_mul_ps(scale.a, factor),
                               _mm256_load_ps(out));
    __m256 b = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots.b), _mm256_mul_ps(scale.b, factor),
                               _mm256_load_ps(out + 8));
    store(out, {a, b});
  }

  struct Pair {
    float a, b;
  };
  static Pair pair(float a, float b) {
    return {to_float(to_bf16(a)), to_float(to_bf16(b))};
  }

  struct Bf16 {
    using X = Pair;
    using Acc = F;
    static constexpr int UNITS = 1;
    static Acc zero() { return Ops::zero(); }
    static Acc add(Acc x, Acc y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static void store(float* out, Acc v) { Ops::store(out, v); }
    static Raw load(const char* line) { return raw(line); }
    static __m256 low(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
    static __m256 high(__m256i w) {
      return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
    }
    static Acc dot(Acc acc, Raw w, const X* x, int) {
      __m256 a = _mm256_broadcast_ss(&x->a), b = _mm256_broadcast_ss(&x->b);
      acc.a = _mm256_fmadd_ps(low(w.a), a, acc.a);
      acc.b = _mm256_fmadd_ps(low(w.b), a, acc.b);
      acc.a = _mm256_fmadd_ps(high(w.a), b, acc.a);
      acc.b = _mm256_fmadd_ps(high(w.b), b, acc.b);
      return acc;
    }
  };

  struct Integers {
    using X = uint32_t;
    using Acc = I;
    static Acc zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static Acc all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
    static Acc add(Acc x, Acc y) {
      return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
    }
    static void store(float* out, Acc v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(out), v.a);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + 8), v.b);
    }
    // Unsigned times signed bytes; sums of two fit 16 bits: 2 * 128 * 127 < 2^15.
    static __m256i dot4(__m256i acc, __m256i bytes, __m256i codes) {
      __m256i sums = _mm256_maddubs_epi16(bytes, codes);
      return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    }
  };

  struct Int8 : Integers {
    static constexpr int UNITS = 1;
    static Raw load(const char* line) {
      Raw w = raw(line);
      __m256i flip = _mm256_set1_epi8(-128);
      return {_mm256_xor_si256(w.a, flip), _mm256_xor_si256(w.b, flip)};
    }
    static Acc dot(Acc acc, Raw w, const X* x, int) {
      __m256i codes = _mm256_set1_epi32(int(*x)), size = _mm256_abs_epi8(codes);
      acc.a = dot4(acc.a, size, _mm256_sign_epi8(w.a, codes));
      acc.b = dot4(acc.b, size, _mm256_sign_epi8(w.b, codes));
      return acc;
    }
  };

  // For weights that may be -128, which has no opposite: their sign goes to x. Up to 12 % slower.
  struct Int8All : Int8 {
    static Acc dot(Acc acc, Raw w, const X* x, int) {
      __m256i codes = _mm256_set1_epi32(int(*x));
      acc.a = dot4(acc.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(codes, w.a));
      acc.b = dot4(acc.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(codes, w.b));
      return acc;
    }
  };

  struct Int4 : Integers {
    static constexpr int UNITS = 2;
    struct Both {
      Raw low, high;
    };
    static Both load(const char* line) {
      Raw w = raw(line);
      __m256i mask = _mm256_set1_epi8(15);
      return {{_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)},
              {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask),
               _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)}};
    }
    static Acc dot(Acc acc, const Both& w, const X* x, int stride) {
      __m256i first = _mm256_set1_epi32(int(x[0])), rest = _mm256_set1_epi32(int(x[stride]));
      acc.a = dot4(dot4(acc.a, w.low.a, first), w.high.a, rest);
      acc.b = dot4(dot4(acc.b, w.low.b, first), w.high.b, rest);
      return acc;
    }
  };
};

}  // namespace

#include "linear_kernel.h"

LinearVariant linear_avx2() { return vector_variant(); }
