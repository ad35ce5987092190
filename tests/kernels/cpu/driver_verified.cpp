// Does the check of drafts stay within exactly the memory it is given, and does it do what a plain
// loop in double precision does?
#include "driver_verified.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "verified.h"

namespace {

using Doubles = std::vector<double>;
constexpr double NEAR = 1e-4;  // two scores or odds so close may change places

double uniform_at(uint64_t key, uint64_t position, uint64_t token) {
  uint64_t z = key + position * 0x9E3779B97F4A7C15ull + (token + 1) * 0xD1342543DE82EF95ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return std::min((double(z >> 32) + 0.5) / 4294967296.0, 1.0 - 0x1p-24);
}

Doubles odds_of(const float* logits, int64_t size, double temperature) {
  Doubles odds(logits, logits + size);
  double most = *std::max_element(odds.begin(), odds.end()), total = 0;
  for (double& x : odds) total += x = std::exp((x - most) / temperature);
  for (double& x : odds) x /= total;
  return odds;
}

// Is `token` as good as the best of these weights with the noise of `key`?
bool is_best(const Doubles& weights, uint64_t key, uint64_t position, int64_t token) {
  double best = -INFINITY, found = -INFINITY;
  for (size_t v = 0; v < weights.size(); ++v) {
    if (weights[v] <= 0) continue;
    double score = std::log(weights[v]) - std::log(-std::log1p(-uniform_at(key, position, v)));
    best = std::max(best, score);
    if (int64_t(v) == token) found = score;
  }
  return found > best - NEAR;
}

bool is_right(const VerifyArgs& a, int64_t b, int64_t j, int64_t token) {
  const DrawArgs& d = a.draw;
  int64_t row = b * (a.num_draft_tokens + 1) + j;
  uint64_t key = uint64_t(d.keys[row]), position = uint64_t(d.positions[row]);
  Doubles p = odds_of(static_cast<const float*>(d.logits) + row * d.stride, d.size,
                      d.temperatures[row]);
  if (!a.is_verified[b] || j == a.num_draft_tokens) return is_best(p, key, position, token);
  const float* logits = static_cast<const float*>(a.draft_logits) + b * a.logits_row_stride;
  Doubles q = odds_of(logits + j * a.logits_stride, d.size, d.temperatures[row]);
  size_t draft_token = size_t(a.draft_tokens[b * a.draft_stride + j]);
  double coin = uniform_at(key ^ 0xE7037ED1A0B428DBull, position, 0);
  if (std::abs(coin * q[draft_token] - p[draft_token]) < NEAR * p[draft_token]) return true;  // either will do
  if (coin * q[draft_token] < p[draft_token]) return token == int64_t(draft_token);
  double total = 0;
  for (size_t v = 0; v < p.size(); ++v) total += p[v] = std::max(p[v] - q[v], 0.0);
  return total < NEAR || is_best(p, key ^ 0x8EBC6AF09C88C6E3ull, position, token);
}

}  // namespace

int check_checked(std::mt19937& noise) {
  const int64_t sizes[] = {1, 2, 7, 8, 15, 16, 17, 33, 100, 257, 4096, 4100};
  int64_t rows = 1 + int64_t(noise() % 4), k = 1 + int64_t(noise() % 4), size = sizes[noise() % 12];
  int64_t tokens = rows * (k + 1);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(size_t(tokens * size)), draft_logits(size_t(rows * k * size));
  for (float& x : logits) x = normal(noise);
  for (float& x : draft_logits) x = normal(noise);
  std::vector<int64_t> positions, keys, draft_tokens, ids(size_t(tokens), -7);
  std::vector<float> temperatures, noisy(size_t(tokens), 1.0f);
  std::vector<uint8_t> is_verified, is_sound(size_t(tokens), 7);
  for (int64_t i = 0; i < tokens; ++i) {
    positions.push_back(int64_t(noise() % 1000));
    keys.push_back(int64_t(uint64_t(noise()) << 32 | noise()));
    temperatures.push_back(0.3f + float(noise() % 100) / 50.0f);
  }
  for (int64_t b = 0; b < rows; ++b) {
    is_verified.push_back(noise() % 4 != 0);
    for (int64_t j = 0; j < k; ++j) draft_tokens.push_back(int64_t(noise() % uint64_t(size)));
  }
  bool is_broken = noise() % 5 == 0;
  if (is_broken) logits[noise() % logits.size()] = std::numeric_limits<float>::quiet_NaN();
  VerifyArgs args{{logits.data(), positions.data(), keys.data(), temperatures.data(), noisy.data(),
                  ids.data(), is_sound.data(), tokens, size, size, 0},
                 draft_tokens.data(), draft_logits.data(), is_verified.data(),
                 rows, k, k, k * size, size, 0};
  int result = rl_verify(&args);
  bool failed = result != 0;
  for (int64_t b = 0; b < rows; ++b) {
    bool is_reached = true;
    for (int64_t j = 0; j <= k; ++j) {
      size_t row = size_t(b * (k + 1) + j);
      bool is_token = ids[row] >= 0 && ids[row] < size && is_sound[row] <= 1;
      failed |= !is_token || (!is_broken && !is_sound[row]);
      if (is_reached && !is_broken) failed |= !is_right(args, b, j, ids[row]);
      is_reached = is_reached && j < k && ids[row] == draft_tokens[size_t(b * k + j)];
    }
  }
  if (failed) {
    std::printf("checked: rows %d draft_tokens %d size %d broken %d: result %d\n", int(rows), int(k),
                int(size), int(is_broken), result);
  }
  return failed;
}
