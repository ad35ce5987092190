// What stands before and behind the products of tiles, with 512 bit vectors: rows of x as lines of
// bfloat16 or of codes, and sums as rows of y. With tiles both take a good part of the time.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace {

// ---- rows of x -------------------------------------------------------------------------------

struct Row {
  const char* numbers;
  bool is_bf16;
};

inline Row row_of(const RlLinear& call, int64_t row) {
  bool is_bf16 = call.x_dtype == RL_BF16;
  int64_t at = row_in(call.x_rows, row) * call.x_stride * (is_bf16 ? 2 : 4);
  return {static_cast<const char*>(call.x) + at, is_bf16};
}

inline __mmask16 first_of(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1 << count) - 1);
}

// 16 numbers from `at` on; those not in `mask` are not read.
inline __m512 floats_of(const char* numbers, bool is_bf16, int64_t at, __mmask16 mask) {
  if (!is_bf16) return _mm512_maskz_loadu_ps(mask, reinterpret_cast<const float*>(numbers) + at);
  __m256i half = _mm256_maskz_loadu_epi16(mask, reinterpret_cast<const bf16*>(numbers) + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Lines of 32 bfloat16, `step` bytes apart; the last one is filled up with zeros.
inline void row_bf16(const Row& row, int64_t count, int64_t step, char* out) {
  for (int64_t at = 0; at < count; at += 32, out += step) {
    int64_t left = count - at;
    if (row.is_bf16) {
      __mmask32 mask = left >= 32 ? __mmask32(~0u) : __mmask32((1u << left) - 1);
      const bf16* from = reinterpret_cast<const bf16*>(row.numbers) + at;
      _mm512_store_si512(out, _mm512_maskz_loadu_epi16(mask, from));
      continue;
    }
    __m512 low = floats_of(row.numbers, false, at, first_of(left));
    __m512 high = floats_of(row.numbers, false, at + 16, first_of(left - 16));
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// The largest magnitude; NaN if there is one: as bits it is larger than infinity.
inline float row_most(const Row& row, int64_t begin, int64_t count) {
  __m512i most = _mm512_setzero_si512(), mask = _mm512_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < count; i += 16) {
    __m512 x = floats_of(row.numbers, row.is_bf16, begin + i, first_of(count - i));
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), mask));
  }
  int32_t bits = _mm512_reduce_max_epi32(most);
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Nearest integers, ties to even, as lines of 64; returns their sum. What is not finite is -128.
inline int32_t row_codes(const Row& row, int64_t begin, int64_t count, float inverse, int64_t step,
                         char* out) {
  // packs_* work in quarters of a vector: this is the order of what they leave
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sum = _mm512_setzero_si512();
  __m512 factor = _mm512_set1_ps(inverse);
  for (int64_t at = 0; at < count; at += 64, out += step) {
    __m512i part[4];
    for (int i = 0; i < 4; ++i) {
      int64_t here = at + 16 * i;
      __m512 x = floats_of(row.numbers, row.is_bf16, begin + here, first_of(count - here));
      part[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    }
    __m512i low = _mm512_packs_epi32(part[0], part[1]), high = _mm512_packs_epi32(part[2], part[3]);
    __m512i codes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_store_si512(out, codes);
    sum = _mm512_dpbusd_epi32(sum, ones, codes);
  }
  return _mm512_reduce_add_epi32(sum);
}

// ---- rows of y -------------------------------------------------------------------------------

// 16 scales of int8 rows from `at` on.
inline __m512 scales_of(const RlMatrix& m, int64_t at, __mmask16 mask) {
  const char* scales = static_cast<const char*>(m.scales);
  if (m.scale_dtype != RL_S_F16) return floats_of(scales, m.scale_dtype == RL_S_BF16, at, mask);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(scales) + at;
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

struct Ends {  // of one or two panels
  __m512 bias[2], scale[2];
  int64_t column[2];
  __mmask16 mask[2];  // columns that there are
  int count;
};

inline Ends ends_of(const RlLinear& call, const int64_t* panels, int count) {
  Ends e;
  e.count = count;
  for (int n = 0; n < count; ++n) {
    e.column[n] = panels[n] * PANEL;
    e.mask[n] = first_of(call.matrix.outputs - e.column[n]);
    e.bias[n] = _mm512_setzero_ps();
    if (call.bias)
      e.bias[n] = floats_of(static_cast<const char*>(call.bias), call.bias_dtype == RL_BF16,
                            e.column[n], e.mask[n]);
    e.scale[n] = _mm512_set1_ps(1.0f);
    if (call.matrix.format == RL_W_INT8)
      e.scale[n] = scales_of(call.matrix, e.column[n], e.mask[n]);
  }
  return e;
}

// 1 / (1 + e^-x), within a few ulp; near 0 for x below -80.
inline __m512 sigmoid(__m512 x) {
  const __m512 most = _mm512_set1_ps(120.0f), one = _mm512_set1_ps(1.0f);
  __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
  power = _mm512_max_ps(_mm512_min_ps(power, most), _mm512_set1_ps(-120.0f));
  __m512 n = _mm512_roundscale_ps(power, 8), r = _mm512_sub_ps(power, n);
  __m512 p = _mm512_set1_ps(1.540353e-4f);  // of 2^r: ln 2 ^ i / i!
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, r, one);
  __m512 below = _mm512_add_ps(_mm512_scalef_ps(p, n), one);
  __m512 guess = _mm512_rcp14_ps(below);  // 14 bits; a step of Newton's doubles them
  __m512 wrong = _mm512_fnmadd_ps(below, guess, one);
  return _mm512_fmadd_ps(guess, wrong, guess);
}

inline void store_numbers(void* base, bool is_bf16, int64_t at, __mmask16 mask, __m512 y) {
  if (is_bf16)
    _mm256_mask_storeu_epi16(static_cast<bf16*>(base) + at, mask,
                             (__m256i)_mm512_cvtneps_pbh(y));
  else
    _mm512_mask_storeu_ps(static_cast<float*>(base) + at, mask, y);
}

struct Sums {  // of a tile: [panels][16][16], as float or, of int8 layers, as int32
  const char* raw;
  const float* x_scales;   // int8
  const int32_t* offsets;  // int8: for codes + 128
};

template <bool IS_INT8>
inline __m512 finished(const Ends& e, const Sums& s, int64_t row, int panel) {
  const char* from = s.raw + (panel * 16 + row) * LINE;
  if (!IS_INT8) return _mm512_add_ps(_mm512_load_ps(from), e.bias[panel]);
  __m512i dots = _mm512_add_epi32(_mm512_load_si512(from), _mm512_set1_epi32(s.offsets[row]));
  __m512 scale = _mm512_mul_ps(e.scale[panel], _mm512_set1_ps(s.x_scales[row]));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, e.bias[panel]);
}

inline void put_numbers(const RlLinear& call, const Ends& e, int64_t row, int panel, __m512 y) {
  if (call.row_weights) y = _mm512_mul_ps(y, _mm512_set1_ps(call.row_weights[row]));
  row = row_in(call.y_rows, row);
  if (call.residual) {
    int64_t at = row * call.residual_stride + e.column[panel];
    y = _mm512_add_ps(y, floats_of(static_cast<const char*>(call.residual),
                                   call.residual_dtype == RL_BF16, at, e.mask[panel]));
  }
  store_numbers(call.y, call.y_dtype == RL_BF16, row * call.y_stride + e.column[panel],
                e.mask[panel], y);
}

inline __m512 gated(const RlLinear& call, __m512 gate, __m512 up) {
  if (call.gated != RL_CLAMPED) return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid(gate)), up);
  const __m512 most = _mm512_set1_ps(CLAMP), least = _mm512_set1_ps(-CLAMP);
  gate = _mm512_min_ps(most, gate);  // of a NaN the second
  up = _mm512_add_ps(_mm512_max_ps(least, _mm512_min_ps(most, up)), _mm512_set1_ps(1.0f));
  __m512 odds = sigmoid(_mm512_mul_ps(gate, _mm512_set1_ps(STEEPNESS)));
  return _mm512_mul_ps(_mm512_mul_ps(gate, odds), up);
}

template <bool IS_INT8>
inline void finish_rows(const RlLinear& call, const Ends& e, const Sums& s, int64_t first_row,
                        int64_t rows) {
  for (int64_t m = 0; m < rows; ++m) {
    __m512 y = finished<IS_INT8>(e, s, m, 0);
    if (call.gated) y = gated(call, y, finished<IS_INT8>(e, s, m, 1));
    put_numbers(call, e, first_row + m, 0, y);
    if (!call.gated && e.count == 2)
      put_numbers(call, e, first_row + m, 1, finished<IS_INT8>(e, s, m, 1));
  }
}

inline void finish_tile(const RlLinear& call, const Ends& e, const Sums& s, int64_t first_row,
                        int64_t rows) {
  call.matrix.format == RL_W_INT8 ? finish_rows<true>(call, e, s, first_row, rows)
                                  : finish_rows<false>(call, e, s, first_row, rows);
}

}  // namespace
