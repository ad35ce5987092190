// How are weighed values added up as they lie in the cache?
//
// Included by one file for each variant; see elementwise_wide.h. Codes of 8 bits become floats here:
// with weights of 16 bits and products of whole numbers it took longer (Zen 4).
#pragma once

#include "attention_cache.h"

namespace {

constexpr int64_t KEYS = 32;  // of one block of keys
#if defined(__AVX512F__)
constexpr int NV = 4;         // vectors of columns that are in registers
#else
constexpr int NV = 2;
#endif

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
template <class C, int G, int N, bool IS_WHOLE>
inline void gather(const C* v, const int64_t* offsets, int64_t num, const float* weights,
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

template <class C, int G>
inline void gather_all(const AttentionArgs& a, const C* v, const int64_t* offsets, int64_t num,
                       const float* weights, const float* kept, float* sums, Ahead& ahead) {
  int64_t size = a.head_dim, stride = padded_head(size), d = 0;
  for (; d + NV * W <= size; d += NV * W)
    gather<C, G, NV, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
  if (NV > 3 && d + 3 * W <= size) {
    gather<C, G, 3, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
    d += 3 * W;
  } else if (NV > 2 && d + 2 * W <= size) {
    gather<C, G, 2, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
    d += 2 * W;
  }
  for (; d + W <= size; d += W)
    gather<C, G, 1, true>(v + d, offsets, num, weights, kept, sums + d, stride, 0, ahead);
  if (d < size)
    gather<C, G, 1, false>(v + d, offsets, num, weights, kept, sums + d, stride, size - d, ahead);
}

}  // namespace
