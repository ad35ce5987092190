// How fast can memory be read? Hardly more than loads, by all threads: the ceiling of small steps.
// What was read is mixed into 64 bits that tell one content from another (sums as in "An Arithmetic
// Checksum for Serial Transmissions", Fletcher, 1982).
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "pool.h"

namespace {

constexpr int64_t PIECE_BYTES = 256 << 10;

}  // namespace

struct RlRead {
  const void* from;   // aligned to 64 bytes
  int64_t num_bytes;  // the rest behind the last whole line is left out
  uint64_t mixed;     // out: of all that was read, and of where it stood
};

namespace {

void read_task(void* raw, int task, int) {
  auto* call = static_cast<RlRead*>(raw);
  int64_t begin = task * PIECE_BYTES, end = begin + PIECE_BYTES;
  if (end > call->num_bytes) end = call->num_bytes / 64 * 64;
  const char* from = static_cast<const char*>(call->from);
  __m256i sums[4] = {};  // two of the numbers, two of the sums: they tell in which order
  for (int64_t at = begin; at < end; at += 64) {
    __builtin_prefetch(from + at + 2048, 0, 3);
    const auto* line = reinterpret_cast<const __m256i*>(from + at);
    sums[0] = _mm256_add_epi64(sums[0], _mm256_load_si256(line));
    sums[1] = _mm256_add_epi64(sums[1], _mm256_load_si256(line + 1));
    sums[2] = _mm256_add_epi64(sums[2], sums[0]);
    sums[3] = _mm256_add_epi64(sums[3], sums[1]);
  }
  uint64_t words[16];
  std::memcpy(words, sums, sizeof sums);
  uint64_t mixed = 0x2545f4914f6cdd1du;
  for (uint64_t word : words) mixed = ((mixed >> 29) ^ mixed ^ word) * 0x9e3779b97f4a7c15u;
  mixed *= 2 * uint64_t(task) + 1;
  __atomic_fetch_xor(&call->mixed, mixed ^ (mixed >> 32), __ATOMIC_RELAXED);
}

}  // namespace

RL_API int rl_read(RlRead* call) {
  call->mixed = 0;
  pool_run(int((call->num_bytes + PIECE_BYTES - 1) / PIECE_BYTES), read_task, call);
  return 0;
}
