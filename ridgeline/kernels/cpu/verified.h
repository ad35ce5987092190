// Which token comes out at each position of a checked run? Its arguments; see kernels.verified_rows.
//
// Fields and strides as in elementwise.h. Letters: B rows of the step, k drafts of each.
#pragma once

#include "elementwise.h"

// `draw` has k + 1 rows for each of B. Behind the first token of a row that was not drafted nothing
// is drawn, as nobody gets there: ids are 0, and is_sound 1.
struct VerifyArgs {
  DrawArgs draw;
  const int64_t* draft_tokens;
  const void* draft_logits;
  const uint8_t* is_verified;
  int64_t rows, num_draft_tokens, draft_stride, logits_row_stride, logits_stride, draft_dtype;
};

// 0; ids and is_sound are those of kernels.verified_rows.
RL_API int rl_verify(const VerifyArgs* args);
