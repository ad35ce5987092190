// The CUDA kernel `paged_decode`, run by a CPU, for a test to call. SOURCE: the kernel's file.

#include "cuda_on_cpu.h"
#include SOURCE

static void* const* given;

template <class T>
T argument(int i) {
  return *(const T*)given[i];
}

static void kernel() {
#if SPLIT
  const auto run = paged_decode_split;
#else
  const auto run = paged_decode;
#endif
  run(argument<u16*>(0), argument<void*>(1), argument<u16*>(2), argument<int*>(3),
               argument<i64*>(4), argument<int*>(5), argument<int*>(6), argument<i64*>(7),
               argument<float*>(8), argument<u16*>(9), argument<u16*>(10), argument<int*>(11),
               argument<float*>(12), argument<float*>(13), argument<float*>(14),
               argument<int*>(15), argument<int*>(16), argument<int>(17), argument<int>(18),
               argument<int>(19), argument<int>(20), argument<int>(21), argument<int>(22),
               argument<float>(23), argument<float>(24), argument<int>(25), argument<void*>(26),
               argument<int>(27));
}

// `programs`: their numbers, in the order in which they run.
extern "C" void launch(void* const* arguments, const int* programs, int num_programs, int groups,
                       int warps) {
  given = arguments;
  emulated::body = kernel;
  std::memset(shared_ring, 0xff, sizeof shared_ring);
  for (int i = 0; i < num_programs; ++i)
    for (int group = 0; group < groups; ++group) emulated::run_block(warps, programs[i], group);
}
