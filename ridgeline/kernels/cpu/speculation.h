// What do steps with drafts need besides the model? Their arguments; kernels.drafts and
// kernels.prompt_lookup have the meaning of each.
//
// All fields are 8 bytes; strides count numbers. The other sides are drafts.py and look_up.py.
// Row 0 is padding: nothing of it is written.
#pragma once

#include <cstdint>

#include "pool.h"

// A line of `fresh` is `fresh_stride` numbers: for each group new blocks (-1: none), then their
// places in the table of the row.
struct BlocksArgs {
  const int64_t* places;
  const int64_t* fresh;
  int32_t* tables;
  int64_t rows, groups, fresh_stride, group_stride, table_stride;
};

// `fresh` null: no blocks are new.
struct DraftInputsArgs {
  const int64_t* places;
  const int64_t* limits;
  const int64_t* fresh;
  const int32_t* tokens;
  const int64_t* lens;
  int32_t* tables;
  int64_t* token_ids;
  int64_t* positions;
  int64_t* next_positions;
  int32_t* seq_lens;
  int64_t* slots;
  int64_t rows, groups, fresh_stride, group_stride, table_stride, table_width;
  int64_t token_stride, token_width, slots_stride;
  int64_t block_size, num_new, first, max_positions;
};

struct AcceptArgs {
  const int64_t* ids;
  const uint8_t* is_sound;
  const int64_t* places;
  const int64_t* limits;
  int32_t* tokens;
  int64_t* lens;
  int64_t* found;
  int64_t* out;
  int64_t rows, num_new, token_stride, token_width, out_stride, out_width;
};

struct PutDraftsArgs {
  const int64_t* ids;
  const int64_t* places;
  int32_t* tokens;
  const int64_t* lens;
  int64_t* found;
  int64_t rows, token_stride, token_width, index;
};

struct FoundArgs {
  const int64_t* places;
  const int64_t* found;
  int64_t* out;
  int64_t rows, out_stride;
};

struct LookUpArgs {
  const int64_t* places;
  int32_t* tokens;
  const int64_t* lens;
  int64_t* found;
  int64_t rows, token_stride, token_width;
  int64_t min_match, max_match, max_draft_tokens, drafts_per_match;
};

RL_API int rl_enter_blocks(const BlocksArgs* args);
RL_API int rl_draft_inputs(const DraftInputsArgs* args);
RL_API int rl_accept(const AcceptArgs* args);
RL_API int rl_put_drafts(const PutDraftsArgs* args);
RL_API int rl_look_up(const LookUpArgs* args);
RL_API int rl_tell_found(const FoundArgs* args);
