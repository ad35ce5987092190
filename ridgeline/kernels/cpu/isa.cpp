#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;
constexpr int XFEATURE_XTILEDATA = 18;
constexpr uint64_t STATE_AVX = 0x6;          // XMM, YMM
constexpr uint64_t STATE_AVX512 = 0xe6;      // + masks, upper halves, ZMM16-31
constexpr uint64_t STATE_TILES = 0x60000;    // + tile configuration and data

bool bit(uint32_t word, int index) { return (word >> index) & 1; }

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool has(uint64_t states, uint64_t wanted) { return (states & wanted) == wanted; }

int find_best() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return ISA_NONE;
  if (!(bit(c, 27) && bit(c, 28) && bit(c, 12) && bit(c, 29))) return ISA_NONE;
  uint64_t states = enabled_states();
  uint32_t b7, c7, d7, a71 = 0, ignore;
  if (!has(states, STATE_AVX) || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return ISA_NONE;
  if (!bit(b7, 5)) return ISA_NONE;
  bool avx512 = bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31) && bit(c7, 11);
  if (!avx512 || !has(states, STATE_AVX512)) return ISA_AVX2;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &ignore, &ignore, &ignore);
  if (!bit(a71, 5)) return ISA_AVX512;
#ifdef RL_EMULATE_TILES
  return ISA_AMX;
#endif
  bool tiles = bit(d7, 22) && bit(d7, 24) && bit(d7, 25);
  if (!tiles || !has(states, STATE_TILES)) return ISA_BF16;
  bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed ? ISA_AMX : ISA_BF16;
}

std::atomic<int> chosen{-1};

}  // namespace

// Of the interface that this library was built for; see native.py.
RL_API int rl_abi() { return RL_ABI; }

RL_API int isa_best() {
  static const int best = find_best();
  return best;
}

RL_API int isa_level() {
  int level = chosen.load(std::memory_order_relaxed);
  return level < 0 ? isa_best() : level;
}

RL_API int isa_set(int level) {
  if (level < ISA_NONE || level > isa_best()) return -1;
  chosen.store(level, std::memory_order_relaxed);
  return level;
}
