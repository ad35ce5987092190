// The CUDA kernels for weights of 4 bits, run by a CPU, for a test to call. SOURCE: a kernel's file;
// RUNS_INT4_STREAM: which one. What the copy engine brings arrives when it is waited for; until then
// its place holds 0xff.

#define BFLOAT16 (ELEMENT == 0)
#define BITS 16
#define __align__(x)
#include "cuda_on_cpu.h"

#include <map>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

alignas(1024) char room[232448];

inline u32 minus(u32 x, u32 y) { return pack(low(x) - low(y), high(x) - high(y)); }
inline u32 times(u32 x, u32 y) { return pack(low(x) * low(y), high(x) * high(y)); }
inline float number_of_half(u16 bits) { return low_half(bits); }
inline float number_of_bits(u32 bits) { return emulated::value_of<float>(bits); }
inline u32 pair_of(float first, float second) { return pack(first, second); }
inline u32 opens_of_launch() { return ELEMENT ? 0x64006400u : 0x43004300u; }
template <class T>
T __ldg(const T* at) {
  return *at;
}

typedef char* Place;
inline Place place_of(void* p) { return (char*)p; }

namespace emulated {

struct Barrier {
  bool made = false;
  unsigned phase = 0;
  int expected = 0;
  std::vector<Copy> copies;
};
static std::map<Place, Barrier> barriers;

inline Barrier& barrier_at(Place at) {
  if ((at - room) % 8 || at < room || at >= room + sizeof room) fail("a barrier is not there");
  return barriers[at];
}

}  // namespace emulated

inline void make_barrier(Place at) { emulated::barrier_at(at).made = true; }
inline void show_barriers() {}

inline void expect(Place at, u32 bytes) {
  auto& barrier = emulated::barrier_at(at);
  if (!barrier.made || barrier.expected) emulated::fail("a barrier is not free");
  barrier.expected = bytes;
}

inline void copy_bytes(Place to, const char* from, u32 bytes, Place at, u64) {
  if ((to - room) % 16 || (uintptr_t)from % 16 || bytes % 16)
    emulated::fail("bytes that are not on 16");
  std::memset(to, 0xff, bytes);
  emulated::barrier_at(at).copies.push_back({to, from, (int)bytes, true});
}

// The first lane to wait finds all that was sent.
inline void wait_for(Place at, u32 parity) {
  auto& barrier = emulated::barrier_at(at);
  if ((barrier.phase & 1) == parity) {
    int bytes = 0;
    for (const auto& copy : barrier.copies) {
      std::memcpy(copy.to, copy.from, copy.size);
      bytes += copy.size;
    }
    if (!bytes || bytes != barrier.expected) emulated::fail("a barrier waits for ever");
    barrier.copies.clear();
    barrier.expected = 0;
    ++barrier.phase;
  }
}

inline u64 once() { return 0; }
struct alignas(8) float2 { float x, y; };

inline void copy_vector(Place to, const char* from) { copy_bytes_ahead(to, from, 16, true); }

inline void wait_for_vectors() {
  end_step_of_copies();
  wait_for_copies<0>();
}

inline void read_pieces(u32 (&to)[4], Place at) {
  if ((at - room) % 16) emulated::fail("a row is not on 16 bytes");
  const u64 place = (u64)at;
  const unsigned words[] = {(unsigned)place, (unsigned)(place >> 32)};
  const auto said = emulated::meet(5, words, 2);
  const int mine = emulated::current;
  for (int i = 0; i < 4; ++i) {
    const auto& of = said[8 * i + mine / 4];
    std::memcpy(&to[i], (const char*)(of[0] | (u64)of[1] << 32) + mine % 4 * 4, 4);
  }
}

inline u32 load_bits(const u16* at) { return *at; }
inline float exponential(float x) { return std::exp(x); }

#include SOURCE

static void* const* given;

template <class T>
T argument(int i) {
  return *(const T*)given[i];
}

static void kernel() {
#ifdef RUNS_INT4_STREAM
  int4_stream(argument<char*>(0), argument<char*>(1), argument<u16*>(2), argument<u16*>(3),
              argument<u16*>(4), argument<char*>(5), argument<int>(6), argument<int>(7),
              argument<int>(8), argument<int>(9), argument<int>(10), argument<int>(11),
              argument<int>(12), argument<u64>(13), argument<u64>(14), argument<u64>(15),
              argument<float>(16));
#else
  int4_unpack(argument<char*>(0), argument<u16*>(1), argument<int>(2), argument<int>(3),
              argument<u64>(4));
#endif
}

extern "C" void launch(void* const* arguments, int programs, int warps, int shared_bytes) {
  given = arguments;
  emulated::body = kernel;
  for (int i = 0; i < programs; ++i) {
    std::memset(room, 0xff, sizeof room);
    emulated::barriers.clear();
    emulated::run_block(warps, i, 0);
    for (size_t at = shared_bytes; at < sizeof room; ++at)
      if (room[at] != (char)0xff) emulated::fail("writes beyond its shared memory");
  }
}
