// Is the draft kept that stands at a position, or what is drawn in its place?
#include "verified.h"

#include <cmath>

#include "dtype.h"

namespace {

// Those of kernels.noise.
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, TOKEN_STEP = 0xD1342543DE82EF95ull;
constexpr uint64_t COINS = 0xE7037ED1A0B428DBull, REST = 0x8EBC6AF09C88C6E3ull;

constexpr int64_t WORTH_SHARING = 1 << 12;  // tokens; each takes two exponentials at least
constexpr int MAX_SHARES = 64;

float uniform_of(uint64_t start) {
  uint64_t z = start + TOKEN_STEP;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  float uniform = (float(uint32_t(z >> 32)) + 0.5f) * 0x1p-32f;
  const float below_one = 1.0f - 0x1p-24f;
  return uniform < below_one ? uniform : below_one;
}

float logit_at(const Odds& o, int64_t token) {
  if (o.dtype == RL_F32) return static_cast<const float*>(o.logits)[token];
  uint32_t bits = uint32_t(static_cast<const uint16_t*>(o.logits)[token]) << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

float odds_of(const Odds& o, int64_t token) {
  return std::exp((logit_at(o, token) - o.level) / o.temperature) * o.scale;
}

struct Work {
  const ElementwiseVariant& functions;
  Odds p, q;
  uint64_t start;
  int64_t size, shares;
  float most[2][MAX_SHARES], sum[2][MAX_SHARES], score[MAX_SHARES];
  int64_t at[MAX_SHARES];

  int64_t edge(int64_t task) const { return size * task / shares; }
};

void mass_share(void* raw, int task, int) {
  auto& w = *static_cast<Work*>(raw);
  int64_t begin = w.edge(task), end = w.edge(task + 1);
  w.functions.mass(w.p, begin, end, &w.most[0][task], &w.sum[0][task]);
  w.functions.mass(w.q, begin, end, &w.most[1][task], &w.sum[1][task]);
}

void rest_share(void* raw, int task, int) {
  auto& w = *static_cast<Work*>(raw);
  w.functions.rest(w.p, w.q, w.start, w.edge(task), w.edge(task + 1), &w.score[task], &w.at[task]);
}

// Gives the odds their level and scale; false if they are not numbers.
bool weigh(Odds& odds, const float* most, const float* sum, int64_t shares) {
  odds.level = most[0];
  for (int64_t i = 1; i < shares; ++i) {
    if (most[i] > odds.level || most[i] != most[i]) odds.level = most[i];
  }
  if (odds.level - odds.level != 0) return false;
  float total = 0;
  for (int64_t i = 0; i < shares; ++i) {
    if (sum[i] > 0) total += sum[i] * std::exp((most[i] - odds.level) / odds.temperature);
  }
  odds.scale = 1.0f / total;
  return true;
}

// The token, or -1 if the row's own draw stands.
int64_t by_odds(Work& w, int64_t draft_token, uint64_t key, uint64_t position) {
  int64_t shares = w.size < WORTH_SHARING ? 1 : 2 * pool_threads();
  w.shares = shares < MAX_SHARES ? shares : MAX_SHARES;
  pool_run(int(w.shares), mass_share, &w);
  if (!weigh(w.p, w.most[0], w.sum[0], w.shares) || !weigh(w.q, w.most[1], w.sum[1], w.shares)) {
    return -1;
  }
  float coin = uniform_of((key ^ COINS) + position * GOLDEN);
  if (coin * odds_of(w.q, draft_token) < odds_of(w.p, draft_token)) return draft_token;
  w.start = (key ^ REST) + position * GOLDEN;
  pool_run(int(w.shares), rest_share, &w);
  float best = -INFINITY;
  int64_t at = -1;
  for (int64_t i = 0; i < w.shares; ++i) {
    if (w.score[i] > best) best = w.score[i], at = w.at[i];
  }
  return at;
}

const void* row_of(const void* logits, int64_t dtype, int64_t numbers) {
  return static_cast<const char*>(logits) + numbers * (dtype == RL_F32 ? 4 : 2);
}

}  // namespace

RL_API int rl_verify(const VerifyArgs* args) {
  const VerifyArgs& a = *args;
  const DrawArgs& d = a.draw;
  for (int64_t b = 0; b < a.rows; ++b) {
    bool is_reached = true;
    for (int64_t j = 0; j <= a.num_draft_tokens; ++j) {
      int64_t row = b * (a.num_draft_tokens + 1) + j, token = -1;
      if (!is_reached) {
        d.ids[row] = 0, d.is_sound[row] = 1;
        continue;
      }
      int64_t draft_token = j < a.num_draft_tokens ? a.draft_tokens[b * a.draft_stride + j] : -1;
      if (a.is_verified[b] && draft_token >= 0 && draft_token < d.size) {
        const void* p = row_of(d.logits, d.dtype, row * d.stride);
        const void* q = row_of(a.draft_logits, a.draft_dtype,
                               b * a.logits_row_stride + j * a.logits_stride);
        Work work{*elementwise_variant(), {p, d.dtype, d.temperatures[row], 0, 0},
                  {q, a.draft_dtype, d.temperatures[row], 0, 0}, 0, d.size, 1, {}, {}, {}, {}};
        token = by_odds(work, draft_token, uint64_t(d.keys[row]), uint64_t(d.positions[row]));
      }
      if (token >= 0) {
        d.ids[row] = token, d.is_sound[row] = 1;
      } else {
        draw_row(d, row);
      }
      is_reached = d.is_sound[row] && d.ids[row] == draft_token;
    }
  }
  return 0;
}
