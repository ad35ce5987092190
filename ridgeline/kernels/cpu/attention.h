// What does attention over a paged cache need to know? The call's arguments, and a thread's work.
//
// Letters: T packed tokens, H query heads, K KV heads, D head size, S block size.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"
#include "pool.h"

// Causal attention of the new tokens of each request over the request's blocks. Request b owns
// tokens query_start[b] .. query_start[b + 1]; seq_lens[b] counts them and all before them. Positions
// past the end of the tables are in block 0; a new token that has no numbers in the cache, but NaN,
// does not reach those before it. Strides count numbers; the heads of a token lie D apart in q and
// out.
struct AttentionArgs {
  const void* q;
  void* out;
  const void* k;
  const void* v;
  const int32_t* tables;
  const int64_t* rows;  // which row of the tables is a request's; null: in order
  const int32_t* seq_lens;
  const int32_t* query_start;
  const uint16_t* k_scales;  // of codes, float16; null: none
  const uint16_t* v_scales;
  const uint16_t* k_lows;  // of codes of 4 bits: what is added, as scales lie; null: none
  const uint16_t* v_lows;
  int64_t num_requests, table_stride, table_width, q_stride, out_stride;
  int64_t block_stride, slot_stride, head_stride, block_size;
  int64_t heads, kv_heads, head_dim;
  int64_t window;  // 0: none
  int64_t dtype;   // of q and out; see dtype.h
  int64_t kv_dtype;  // of k and v: the same, RL_I8, RL_I4 or RL_E4M3
  int64_t scale_block_stride, scale_slot_stride, scale_head_stride;
  double scale;
  const float* sinks;  // of each head a further score, whose value is zero; null: none
  double cap;  // scores become cap * tanh(score / cap); 0: none
};

// `tokens` packed tokens from row `token` of q and out on, over the keys [begin, end), all their
// heads; with `grows` each sees one key more than the one before. Or new tokens [begin, end) of a
// request, all heads of KV head `head`, over all they see. partial: the first one's place for what
// is not all of the answer, or -1; the next one's is `parts` further.
struct AttentionItem {
  int32_t request, head;
  int64_t begin, end;
  int64_t token, tokens, grows, partial, parts;
};

constexpr int64_t FEW_TOKENS = 9;  // of a request: each looks at its keys as if it were alone

constexpr int64_t TILE_ROWS = 126;  // of queries times heads of a KV head; 6 rows are worked on
constexpr int64_t TILE_KEYS = 64;

namespace {

// Head size of what is kept as float32.
[[maybe_unused]] inline int64_t padded_head(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }

// Floats of one partial answer: sums of all heads, then their maxima, then their weights.
[[maybe_unused]] inline int64_t partial_floats(const AttentionArgs& a) {
  return a.heads * (padded_head(a.head_dim) + 2);
}

// What the sums of head `h` are multiplied by, where the largest score is `most` and the weights
// beside it make `weight`.
[[maybe_unused]] inline float share_of(const AttentionArgs& a, int64_t h, float most,
                                       float weight) {
  if (!a.sinks) return weight == 0 ? 0.0f : 1.0f / weight;
  float top = a.sinks[h] > most ? a.sinks[h] : most, kept = std::exp(most - top);
  return kept / (weight * kept + std::exp(a.sinks[h] - top));
}

// Tokens of an item: their queries and sums should stay in a core's own cache.
[[maybe_unused]] inline int64_t most_tokens(const AttentionArgs& a) {
  int64_t fit = (1 << 15) / (a.heads * padded_head(a.head_dim));
  return fit < 1 ? 1 : fit < FEW_TOKENS ? fit : FEW_TOKENS;
}

}  // namespace

struct AttentionVariant {
  int64_t (*scratch_floats)(const AttentionArgs&);  // of one thread
  void (*few)(const AttentionArgs&, const AttentionItem&, float* partials, float* scratch);
  void (*merge)(const AttentionArgs&, int64_t token, const float* partials, int64_t count);
  void (*many)(const AttentionArgs&, const AttentionItem&, float* scratch);
};

const AttentionVariant* attention_avx2();
const AttentionVariant* attention_avx512();
const AttentionVariant* attention_bf16();
const AttentionVariant* attention_amx();
