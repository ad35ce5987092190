// Which variant does the work, and how is it shared? The entry points of the small kernels.
#include "elementwise.h"

#include "isa.h"

namespace {

constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers; a call of the pool takes some microseconds
constexpr int MAX_SHARES = 64;

const ElementwiseVariant* variant() { return elementwise_variant(); }

template <class Args>
struct Shared {
  const Args& args;
  void (*run)(const Args&, int64_t, int64_t);
  int64_t shares;
};

template <class Args>
void share(void* raw, int task, int) {
  const auto& s = *static_cast<const Shared<Args>*>(raw);
  s.run(s.args, s.args.rows * task / s.shares, s.args.rows * (task + 1) / s.shares);
}

template <class Args>
int by_rows(const Args* args, void (*run)(const Args&, int64_t, int64_t), int64_t width) {
  if (args->rows * width < WORTH_SHARING || args->rows < 2) {
    run(*args, 0, args->rows);
    return 0;
  }
  int64_t shares = 4 * pool_threads();
  Shared<Args> shared{*args, run, shares < args->rows ? shares : args->rows};
  pool_run(int(shared.shares), share<Args>, &shared);
  return 0;
}

struct Drawing {
  const DrawArgs& args;
  const ElementwiseVariant& functions;
  int64_t row, shares;
  bool is_noisy;
  float level;
  float score[MAX_SHARES];
  int64_t at[MAX_SHARES];
};

void draw_share(void* raw, int task, int) {
  auto& d = *static_cast<Drawing*>(raw);
  int64_t begin = d.args.size * task / d.shares, end = d.args.size * (task + 1) / d.shares;
  float* score = &d.score[task];
  if (d.is_noisy) {
    d.functions.draw(d.args, d.row, begin, end, d.level, score, &d.at[task]);
  } else {
    d.functions.largest(d.args, d.row, begin, end, score, &d.at[task]);
  }
}

// The best of a row and where it is; NaN if there is one.
float best_of_row(Drawing& d, int64_t work, int64_t* at) {
  int64_t shares = work < WORTH_SHARING ? 1 : 2 * pool_threads();
  d.shares = shares < MAX_SHARES ? shares : MAX_SHARES;
  pool_run(int(d.shares), draw_share, &d);
  float most = d.score[0];
  *at = d.at[0];
  for (int64_t i = 1; i < d.shares; ++i) {
    if (d.score[i] > most || d.score[i] != d.score[i]) most = d.score[i], *at = d.at[i];
  }
  return most;
}

}  // namespace

const ElementwiseVariant* elementwise_variant() {
  return isa_level() >= ISA_AVX512 ? elementwise_avx512() : elementwise_avx2();
}

RL_API int rl_norm(const NormArgs* args) { return by_rows(args, variant()->norm, args->size); }

RL_API int rl_gate(const GateArgs* args) { return by_rows(args, variant()->gate, 4 * args->size); }

RL_API int rl_rotate(const RotateArgs* args) {
  if (args->head_dim > MAX_HEAD_DIM) return 1;
  return by_rows(args, variant()->turn, args->stride);
}

void draw_row(const DrawArgs& args, int64_t row) {
  Drawing drawing{args, *variant(), row, 1, false, 0.0f, {}, {}};
  int64_t at = 0;
  float most = best_of_row(drawing, args.size, &at);
  bool is_sound = most - most == 0;  // false for NaN and for infinities
  if (is_sound && args.keys != nullptr && args.noisy[row] != 0) {
    drawing.is_noisy = true, drawing.level = most;
    best_of_row(drawing, 16 * args.size, &at);
  }
  args.is_sound[row] = is_sound;
  args.ids[row] = is_sound ? at : 0;
}

RL_API int rl_draw(const DrawArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row) draw_row(*args, row);
  return 0;
}

RL_API int rl_inputs(const InputsArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row) {
    int64_t place = args->sent[row], position = args->sent[args->sent_stride + row];
    args->token_ids[row] = args->last_ids[place];
    args->positions[row] = position;
    args->next_positions[row] = position + 1;
    args->seq_lens[row] = int32_t(position + 1);
    int64_t at = position / args->block_size, offset = position % args->block_size;
    for (int64_t group = 0; group < args->groups; ++group) {
      int64_t fresh = args->sent[(2 + group) * args->sent_stride + row];
      int32_t* table = args->tables + group * args->group_stride + place * args->table_stride;
      if (fresh >= 0) table[at] = int32_t(fresh);
      args->slots[group * args->slots_stride + row] = table[at] * args->block_size + offset;
    }
  }
  return 0;
}

RL_API int rl_remember(const RememberArgs* args) {
  for (int64_t row = 0; row < args->rows; ++row) {
    args->last_ids[args->places[row]] = args->ids[row];
    args->out[row] = args->is_sound[row] ? args->ids[row] : -1;
  }
  return 0;
}
