// How do we write one kernel for AVX2 and AVX-512? Vectors of W floats, in GCC's own notation.
//
// Included by one file for each variant, inside whose unnamed namespace all of it lies: nothing
// that is compiled for one processor may be linked into code for another.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));

struct B16 {
  uint16_t bits;
};

// A whole number that a scale belongs to.
struct I8 {
  int8_t code;
};

// Two codes of a head: number i in the low half, number size / 2 + i in the high one.
struct I4 {
  uint8_t pair;
};

struct E4m3 {
  uint8_t bits;
};

inline F all(float x) { return x - F{}; }

inline F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline F load(const B16* p) {
  Half h;
  std::memcpy(&h, p, sizeof h);
  return (F)(__builtin_convertvector(h, U) << 16);
}

inline F load(const I8* p) {
#if defined(__AVX512F__)
  __m128i codes;
  std::memcpy(&codes, p, sizeof codes);
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
  __m128i codes = {};
  std::memcpy(&codes, p, W);
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#endif
}

inline F load(const E4m3* p) {
#if defined(__AVX512F__)
  __m128i bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  U bits = (U)_mm512_cvtepu8_epi32(bytes);
#else
  __m128i bytes = {};
  std::memcpy(&bytes, p, W);
  U bits = (U)_mm256_cvtepu8_epi32(bytes);
#endif
  U size = bits & 0x7f;
  F tiny = __builtin_convertvector((I)size, F) * 0x1p-9f;
  F found = size < 8 ? tiny : (F)((size << 20) + (120u << 23));
  found = size == 0x7f ? all(__builtin_nanf("")) : found;
  return (F)((U)found | (bits & 0x80) << 24);
}

// W numbers of float16.
inline F from_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  __m256i halves;
  std::memcpy(&halves, p, sizeof halves);
  return (F)_mm512_cvtph_ps(halves);
#else
  __m128i halves;
  std::memcpy(&halves, p, sizeof halves);
  return (F)_mm256_cvtph_ps(halves);
#endif
}

// The nearest whole numbers, of two the even one; below 2^31.
inline I near(F x) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtps_epi32((__m512)x);
#else
  return (I)_mm256_cvtps_epi32((__m256)x);
#endif
}

#if defined(__AVX512F__)
// The low byte of each.
inline void store_bytes(void* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
}

// 64 codes, zeros from the n-th on; nothing behind p + n is touched.
inline __m512i codes_of(const I8* p, int64_t n) {
  return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, p);
}
#endif

inline F magnitude(F x) { return (F)((U)x & 0x7fffffff); }

// The nearest number of e4m3, of two the even one: its 8 bits. Beyond 448 it is 448.
inline I e4m3_of(F x) {
  F size = magnitude(x);
  size = size > 448.0f ? all(448.0f) : size;
  U bits = (U)size;
  U code = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  code = size < 0x1p-6f ? (U)near(size * 512.0f) : code;
  code = x != x ? U{} + 0x7f : code;
  return (I)(code | ((U)x >> 24 & 0x80));
}

// Codes of a head one to a byte, from -MIDDLE on: what is rounded later is smaller then. `size` is
// 16 or a multiple of 32.
constexpr int MIDDLE = 8;

inline void unpack(const I4* pairs, I8* codes, int64_t size) {
  const int64_t half = size / 2, step = half < 16 ? 8 : 16;
  const __m128i low = _mm_set1_epi8(15), middle = _mm_set1_epi8(MIDDLE);
  for (int64_t i = 0; i < half; i += step) {
    __m128i x = {};
    std::memcpy(&x, pairs + i, 8);
    if (step == 16) std::memcpy(&x, pairs + i, 16);
    __m128i first = _mm_and_si128(x, low), second = _mm_and_si128(_mm_srli_epi16(x, 4), low);
    first = _mm_sub_epi8(first, middle), second = _mm_sub_epi8(second, middle);
    std::memcpy(codes + i, &first, size_t(step));
    std::memcpy(codes + half + i, &second, size_t(step));
  }
}

inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }

// To the nearest, ties to even; NaN stays one.
inline Half rounded(F x) {
  U bits = (U)x;
  U near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  U is_nan = (U)(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & near), Half);
}

inline void store(B16* p, F x) {
  Half h = rounded(x);
  std::memcpy(p, &h, sizeof h);
}

inline float to_float(float x) { return x; }

inline float to_float(B16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void from_float(float* p, float x) { *p = x; }

inline void from_float(B16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The first n numbers and zeros behind them; nothing behind p + n is touched.
template <class T>
inline F load_some(const T* p, int64_t n) {
  if (n >= W) return load(p);
  T padded[W] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

template <class T>
inline void store_some(T* p, F x, int64_t n) {
  if (n >= W) return store(p, x);
  T padded[W];
  store(padded, x);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}

inline F larger(F a, F b) { return a > b ? a : b; }

// Every place of it is the sum of all.
inline F folded(F x) {
#if defined(__AVX512F__)
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
  return x;
}

inline float sum_of(F x) { return folded(x)[0]; }

inline float max_of(F x) {
#if defined(__AVX512F__)
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4,
                                        5, 6, 7));
#endif
  float y[8];
  std::memcpy(y, &x, sizeof y);
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; ++i) y[i] = y[i] > y[i + half] ? y[i] : y[i + half];
  return y[0];
}

// Place i of it is the sum of x[i]. At each level half as many vectors hold sums of parts half as
// long.
inline F sums_of(F* x) {
#if defined(__AVX512F__)
  for (int i = 0; i < 8; ++i) {
    F a = x[i], b = x[i + 8];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                                   29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    F a = x[i], b = x[i + 4];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28,
                                   29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    F a = x[i], b = x[i + 2];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14,
                                   15, 30, 31);
  }
  F a = x[0], b = x[1];
  return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
  for (int i = 0; i < 4; ++i) {
    F a = x[i], b = x[i + 4];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 2; ++i) {
    F a = x[i], b = x[i + 2];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  F a = x[0], b = x[1];
  return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
#endif
}

// y[i] = x[i ^ STEP] + x[i], with the sign of x[i] turned where i has the bit STEP.
template <int STEP>
inline F butterfly(F x) {
  F signs;
  for (int i = 0; i < W; ++i) signs[i] = i & STEP ? -1.0f : 1.0f;
#if defined(__AVX512F__)
  F other = STEP == 8   ? __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4,
                                                  5, 6, 7)
            : STEP == 4 ? __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8,
                                                  9, 10, 11)
            : STEP == 2 ? __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14,
                                                  15, 12, 13)
                        : __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13,
                                                  12, 15, 14);
#else
  F other = STEP == 4   ? __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
            : STEP == 2 ? __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
                        : __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
  return other + x * signs;
}

// A head times Sylvester's matrix with orthonormal rows, in place; `size` is a power of two, 16 at
// least.
inline void hadamard(float* x, int64_t size) {
  const float root = 1.0f / __builtin_sqrtf(float(size));
  for (int64_t i = 0; i < size; i += W) {
    F y = butterfly<1>(load(x + i) * root);
    y = butterfly<4>(butterfly<2>(y));
    if (W == 16) y = butterfly<8>(y);
    store(x + i, y);
  }
  for (int64_t half = W; half < size; half *= 2)
    for (int64_t i = 0; i < size; i += 2 * half)
      for (int64_t j = i; j < i + half; j += W) {
        F a = load(x + j), b = load(x + j + half);
        store(x + j, a + b);
        store(x + j + half, a - b);
      }
}

// e^x to 2 ulp (Cephes' polynomial); 0 below -87, NaN stays one, no infinity: 88 is the most.
inline F exp_of(F x) {
  F bounded = x > 88.0f ? all(88.0f) : x;
  bounded = bounded < -87.0f ? all(-87.0f) : bounded;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  F n = (bounded * 1.44269504088896341f + magic) - magic;
  F r = bounded - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  I power = (__builtin_convertvector(n, I) + 127) << 23;
  F scaled = y * (F)power;
  return x < -87.0f ? F{} : scaled;
}

}  // namespace
