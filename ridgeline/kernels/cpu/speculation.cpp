// How do drafted tokens come into a step, which come out of it, and what came next before?
#include "speculation.h"

namespace {

constexpr int64_t COUNTS = 3;                 // of a row of `accept`, before its tokens
constexpr int64_t STRIDE = 64;                // tokens that are looked at together
constexpr int64_t WORTH_SHARING = 1 << 15;  // tokens; a call of the pool takes some microseconds

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

struct Match {
  int64_t end, length;
};

// The longest match with the end of `tokens`, of equals the last; length 0: none is long enough.
// An end is looked at only if the token that a longer match needs is there.
Match longest_match(const int32_t* tokens, int64_t num, int64_t min_match, int64_t max_match) {
  Match best{0, 0};
  for (int64_t last = num - 1; last > 0;) {
    int64_t back = most(best.length, min_match - 1);  // one more than this must be equal
    if (last <= back) break;
    int64_t begin = most(back + 1, last - STRIDE + 1);
    int32_t newest = tokens[num - 1], oldest = tokens[num - 1 - back];
    int any = 0;
    for (int64_t end = begin; end <= last; ++end) {
      any |= int(tokens[end - 1] == newest) & int(tokens[end - 1 - back] == oldest);
    }
    for (int64_t end = last; any && end >= begin && end > best.length; --end) {
      if (tokens[end - 1] != newest) continue;
      int64_t length = 1, most_here = least(end, max_match);
      while (length < most_here && tokens[end - 1 - length] == tokens[num - 1 - length]) ++length;
      if (length >= min_match && length > best.length) best = {end, length};
      if (best.length == max_match) return best;
    }
    last = begin - 1;
  }
  return best;
}

void look_up_row(const LookUpArgs& args, int64_t row) {
  int64_t place = args.places[row];
  if (place == 0) return;
  int32_t* tokens = args.tokens + place * args.token_stride;
  int64_t num = args.lens[place];
  Match match = longest_match(tokens, num, args.min_match, args.max_match);
  int64_t found = 0;
  if (match.length > 0) {
    found = least(args.max_draft_tokens, args.token_width - num);
    if (args.drafts_per_match) found = least(found, args.drafts_per_match * match.length);
  }
  // Beyond the row's tokens these are the drafts themselves.
  for (int64_t i = 0; i < found; ++i) tokens[num + i] = tokens[match.end + i];
  args.found[place] = found;
}

int64_t accept_row(const AcceptArgs& args, int64_t row, int32_t* draft_tokens, int64_t room) {
  const int64_t* ids = args.ids + row * args.num_new;
  const uint8_t* is_sound = args.is_sound + row * args.num_new;
  int64_t found = args.found[args.places[row]];
  int64_t limit = least(least(args.limits[row], found), args.num_new - 1);
  int64_t* out = args.out + row * args.out_stride;
  bool is_first_right = found > 0 && room > 0 && is_sound[0] && ids[0] == draft_tokens[0];
  int64_t num = 1;
  while (num <= limit && num <= room && is_sound[num - 1] && ids[num - 1] == draft_tokens[num - 1]) ++num;
  if (!is_sound[num - 1]) num = 0;  // those before it are right, so they are sound
  out[0] = num, out[1] = found, out[2] = is_first_right;
  for (int64_t i = 0; i < args.out_width - COUNTS; ++i) out[COUNTS + i] = i < num ? ids[i] : -1;
  return num;
}

}  // namespace

RL_API int rl_enter_blocks(const BlocksArgs* args) {
  for (int64_t group = 0; group < args->groups; ++group) {
    const int64_t* blocks = args->fresh + 2 * group * args->fresh_stride;
    const int64_t* at = blocks + args->fresh_stride;
    int32_t* tables = args->tables + group * args->group_stride;
    for (int64_t row = 0; row < args->rows; ++row) {
      if (blocks[row] < 0) continue;
      tables[args->places[row] * args->table_stride + at[row]] = int32_t(blocks[row]);
    }
  }
  return 0;
}

RL_API int rl_draft_inputs(const DraftInputsArgs* args) {
  if (args->fresh != nullptr) {
    BlocksArgs blocks{args->places,       args->fresh,        args->tables,      args->rows,
                      args->groups,       args->fresh_stride, args->group_stride, args->table_stride};
    rl_enter_blocks(&blocks);
  }
  for (int64_t row = 0; row < args->rows; ++row) {
    int64_t place = args->places[row], newest = args->lens[place] - 1;
    const int32_t* tokens = args->tokens + place * args->token_stride;
    for (int64_t j = 0; j < args->num_new; ++j) {
      int64_t i = row * args->num_new + j, position = most(0, newest + args->first + j);
      args->token_ids[i] = tokens[least(position, args->token_width - 1)];
      args->positions[i] = least(position, args->max_positions - 1);
      args->next_positions[i] = position + 1;
      args->seq_lens[row] = int32_t(position + 1);
      int64_t at = position / args->block_size, offset = position % args->block_size;
      bool has_block = position <= newest + args->limits[row] && at < args->table_width;
      for (int64_t group = 0; group < args->groups; ++group) {
        const int32_t* table = args->tables + group * args->group_stride;
        int64_t block = has_block ? table[place * args->table_stride + at] : 0;
        args->slots[group * args->slots_stride + i] = block * args->block_size + offset;
      }
    }
  }
  return 0;
}

RL_API int rl_accept(const AcceptArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row) {
    int64_t place = args->places[row], len = args->lens[place];
    int64_t room = args->token_width - len;
    int32_t* draft_tokens = args->tokens + place * args->token_stride + len;
    int64_t num = least(accept_row(*args, row, draft_tokens, room), room);
    if (place == 0) continue;
    for (int64_t i = 0; i < num; ++i) draft_tokens[i] = int32_t(args->ids[row * args->num_new + i]);
    args->lens[place] = len + num;
    args->found[place] = 0;
  }
  return 0;
}

RL_API int rl_put_drafts(const PutDraftsArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row) {
    int64_t place = args->places[row], at = args->lens[place] + args->index;
    if (place == 0 || at >= args->token_width) continue;
    args->tokens[place * args->token_stride + at] = int32_t(args->ids[row]);
    args->found[place] = args->index + 1;
  }
  return 0;
}

RL_API int rl_look_up(const LookUpArgs* args) {
  int64_t tokens = 0;
  for (int64_t row = 0; row < args->rows; ++row) tokens += args->lens[args->places[row]];
  if (tokens < WORTH_SHARING || args->rows < 2) {
    for (int64_t row = 0; row < args->rows; ++row) look_up_row(*args, row);
    return 0;
  }
  auto run = [](void* raw, int row, int) { look_up_row(*static_cast<LookUpArgs*>(raw), row); };
  pool_run(int(args->rows), run, const_cast<LookUpArgs*>(args));
  return 0;
}

RL_API int rl_tell_found(const FoundArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row)
    args->out[row * args->out_stride] = args->found[args->places[row]];
  return 0;
}
