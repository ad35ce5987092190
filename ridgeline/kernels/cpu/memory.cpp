// May the system back this memory by huge pages? Weights are read from end to end at each step, and
// with pages of 4 KiB the walks through page tables take a quarter of the time.
#include <sys/mman.h>

#include <cstdint>

#include "pool.h"

namespace {

constexpr uintptr_t HUGE_PAGE = 2 << 20;

}  // namespace

// For the whole huge pages inside of `begin` .. + num_bytes; it must come before the memory is
// written for the first time. 0 also where there is none or the system refuses: it is advice.
RL_API int rl_advise_huge(void* begin, int64_t num_bytes) {
  uintptr_t first = (uintptr_t(begin) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  uintptr_t last = (uintptr_t(begin) + uintptr_t(num_bytes)) / HUGE_PAGE * HUGE_PAGE;
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return 0;
}
