// The steps of 512 bit vectors; BF16_DOT: with dot products of bfloat16. The products are written as
// instructions: from intrinsics the compiler makes one register of each broadcast, and runs out.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace {

struct Ops {
  static constexpr int MAX1 = 16, MAX2 = 12;
  static constexpr int CHAINS = 2, FEW1 = 7, FEW2 = 7, FEW_PAIRED = 3;
  static constexpr bool BIASED8 = true;  // Int8 multiplies by codes + 128

  static __m512 zero() { return _mm512_setzero_ps(); }
  static void store(float* out, __m512 v) { _mm512_store_ps(out, v); }
  static __m512 load_bf16(const bf16* from) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static __m512 load_scales(const void* scales, int64_t at, int dtype) {
    if (dtype == RL_S_F32) return _mm512_loadu_ps(static_cast<const float*>(scales) + at);
    const bf16* from = static_cast<const bf16*>(scales) + at;
    if (dtype == RL_S_BF16) return load_bf16(from);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static __m512i load_zeros(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static __m512i times(__m512i a, int32_t b) {
    return _mm512_mullo_epi32(a, _mm512_set1_epi32(b));
  }
  static void accumulate(float* out, __m512i dots, __m512 scale, float x_scale) {
    __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    _mm512_store_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), factor, _mm512_load_ps(out)));
  }

#ifdef BF16_DOT
  using Pair = uint32_t;
  static Pair pair(float a, float b) { return uint32_t(to_bf16(b)) << 16 | to_bf16(a); }
#else
  struct Pair {
    float a, b;
  };
  static Pair pair(float a, float b) {
    return {to_float(to_bf16(a)), to_float(to_bf16(b))};
  }
#endif

  struct Bf16 {
    using X = Pair;
    using Acc = __m512;
    static constexpr int UNITS = 1;
    static Acc zero() { return _mm512_setzero_ps(); }
    static Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
    static void store(float* out, Acc v) { _mm512_store_ps(out, v); }
#ifdef BF16_DOT
    static __m512i load(const char* line) { return _mm512_load_si512(line); }
    static Acc dot(Acc acc, __m512i w, const X* x, int) {
      __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
      return acc;
    }
#else
    struct Both {
      __m512 a, b;
    };
    static Both load(const char* line) {
      __m512i w = _mm512_load_si512(line);
      __m512i high = _mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)));
      return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(high)};
    }
    static Acc dot(Acc acc, Both w, const X* x, int) {
      __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w.a), "m"(x->a));
      __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w.b), "m"(x->b));
      return acc;
    }
#endif
  };

  struct Integers {
    using X = uint32_t;
    using Acc = __m512i;
    static Acc zero() { return _mm512_setzero_si512(); }
    static Acc all(int32_t value) { return _mm512_set1_epi32(value); }
    static Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
    static void store(float* out, Acc v) { _mm512_store_si512(out, v); }
    static Acc dot_bytes(Acc acc, __m512i w, const X* x) {
      __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
      return acc;
    }
  };

  struct Int8 : Integers {
    static constexpr int UNITS = 1;
    static __m512i load(const char* line) { return _mm512_load_si512(line); }
    static Acc dot(Acc acc, __m512i w, const X* x, int) {
      return dot_bytes(acc, w, x);
    }
  };
  using Int8All = Int8;

  struct Int4 : Integers {
    static constexpr int UNITS = 2;
    struct Both {
      __m512i low, high;
    };
    static Both load(const char* line) {
      __m512i w = _mm512_load_si512(line), mask = _mm512_set1_epi8(15);
      return {_mm512_and_si512(w, mask), _mm512_and_si512(_mm512_srli_epi16(w, 4), mask)};
    }
    static Acc dot(Acc acc, Both w, const X* x, int stride) {
      return dot_bytes(dot_bytes(acc, w.low, x), w.high, x + stride);
    }
  };
};

}  // namespace
