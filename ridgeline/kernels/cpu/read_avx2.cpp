// How fast can memory be read? Nothing but loads, by all threads: the ceiling of small steps.
#include <immintrin.h>

#include <cstdint>

#include "pool.h"

namespace {

constexpr int64_t PIECE_BYTES = 256 << 10;

}  // namespace

struct RlRead {
  const void* from;   // aligned to 64 bytes
  int64_t num_bytes;  // the rest behind the last whole line is left out
  uint64_t mixed;     // out: of all that was read, so that the reading cannot be left out
};

namespace {

void read_task(void* raw, int task, int) {
  auto* call = static_cast<RlRead*>(raw);
  int64_t begin = task * PIECE_BYTES, end = begin + PIECE_BYTES;
  if (end > call->num_bytes) end = call->num_bytes / 64 * 64;
  const char* from = static_cast<const char*>(call->from);
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t at = begin; at < end; at += 64) {
    __builtin_prefetch(from + at + 2048, 0, 3);
    a = _mm256_xor_si256(a, _mm256_load_si256(reinterpret_cast<const __m256i*>(from + at)));
    b = _mm256_xor_si256(b, _mm256_load_si256(reinterpret_cast<const __m256i*>(from + at + 32)));
  }
  a = _mm256_xor_si256(a, b);
  uint64_t words[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), a);
  __atomic_fetch_xor(&call->mixed, words[0] ^ words[1] ^ words[2] ^ words[3], __ATOMIC_RELAXED);
}

}  // namespace

RL_API int rl_read(RlRead* call) {
  call->mixed = 0;
  pool_run(int((call->num_bytes + PIECE_BYTES - 1) / PIECE_BYTES), read_task, call);
  return 0;
}
