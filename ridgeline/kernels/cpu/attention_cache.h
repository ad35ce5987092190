// How are keys and values found in a paged cache and read? Blocks, codes, their scales.
//
// Included by one file for each variant; see elementwise_wide.h. A code is a whole number from -127
// to 127, or of 4 bits from 0 to 15; with the scale (and low) of its head and token, float16, it is
// a number. Codes are exact in bfloat16 and in float32, so that they are worked with as they are and
// scales come later. Those of 4 bits are unpacked first, a block of keys at a time, and worked with
// as those of 8; keys are turned by Hadamard's matrix there, and so queries are too.
#pragma once

#include "attention.h"
#include "elementwise_wide.h"

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline float exp_one(float x) { return exp_of(all(x))[0]; }

// cap * tanh(x / cap)
inline F capped(F x, float cap) { return cap - 2 * cap / (exp_of(x * (2 / cap)) + 1); }

// Whether numbers of a cache have scales.
template <class C>
constexpr bool HAS_SCALES = false;
template <>
constexpr bool HAS_SCALES<I8> = true;
template <>
constexpr bool HAS_SCALES<I4> = true;

template <class C>
constexpr bool IS_PACKED = false;
template <>
constexpr bool IS_PACKED<I4> = true;

// What the numbers of a cache are worked with as, and what queries T are then made of.
template <class C>
struct Worked {
  using type = C;
  template <class T>
  using Asked = T;
};
template <>
struct Worked<I4> {
  using type = I8;
  template <class T>
  using Asked = float;
};

// Bytes of a head of a token.
template <class C>
inline int64_t head_bytes(const AttentionArgs& a) {
  return IS_PACKED<C> ? a.head_dim / 2 : a.head_dim * int64_t(sizeof(C));
}

// A query turned as packed keys are, in `turned`; the sum of its numbers.
template <class T>
inline float rotate_query(const T* q, float* turned, int64_t size) {
  F sum = {};
  for (int64_t d = 0; d < size; d += W) store(turned + d, load(q + d));
  hadamard(turned, size);
  for (int64_t d = 0; d < size; d += W) sum += load(turned + d);
  return sum_of(sum);
}

// The blocks of one request.
struct Blocks {
  const int32_t* table;
  int64_t size, block_stride, slot_stride, width;

  // Of keys [begin, begin + num).
  void offsets(int64_t begin, int64_t num, int64_t* found) const {
    int64_t block = begin / size, place = begin % size;
    for (int64_t j = 0; j < num; ++j) {
      found[j] = (block < width ? table[block] : 0) * block_stride + place * slot_stride;
      if (++place == size) place = 0, ++block;
    }
  }
};

inline Blocks blocks_of(const AttentionArgs& a, int64_t request) {
  int64_t row = a.rows == nullptr ? request : a.rows[request];
  return {a.tables + row * a.table_stride, a.block_size, a.block_stride, a.slot_stride,
          a.table_width};
}

// The same places among the scales of a cache, of all heads.
inline Blocks scales_of(const AttentionArgs& a, int64_t request) {
  Blocks blocks = blocks_of(a, request);
  blocks.block_stride = a.scale_block_stride, blocks.slot_stride = a.scale_slot_stride;
  return blocks;
}

// Of `num` places, as floats; zeros up to the next whole vector. `scales` is where the head begins.
inline void take_scales(const uint16_t* scales, const int64_t* places, int64_t num, float* taken) {
  for (int64_t j = 0; j < num; j += W) {
    uint16_t some[W] = {};
    for (int64_t i = j; i < least(num, j + W); ++i) some[i - j] = scales[places[i]];
    store(taken + j, from_halves(some));
  }
}

// The same of lows, as unpacked codes want them; `scales` of the same places.
inline void take_lows(const uint16_t* lows, const float* scales, const int64_t* places, int64_t num,
                      float* taken) {
  take_scales(lows, places, num, taken);
  for (int64_t j = 0; j < num; j += W)
    store(taken + j, load(taken + j) + load(scales + j) * float(MIDDLE));
}

// Keys of a tile, a bit each.
using KeySet = uint64_t;
static_assert(TILE_KEYS == 64, "a bit for each key of a tile");

inline KeySet keys_between(int64_t low, int64_t high) {
  auto below = [](int64_t key) {
    return key <= 0 ? KeySet(0) : key >= TILE_KEYS ? ~KeySet(0) : (KeySet(1) << key) - 1;
  };
  return below(high) & ~below(low);
}

inline bool is_number(float x) { return x - x == 0.0f; }

}  // namespace
