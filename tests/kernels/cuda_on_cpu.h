// Enough of CUDA to run a kernel on a CPU: 32 lanes as coroutines that meet at every warp
// operation, warps one after the other from barrier to barrier. A copy that runs ahead arrives as late
// as it may: when it is waited for, and until then its place holds NaN. Meetings of lanes at
// different operations, and places that are not on 16 bytes, end the process.

#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define INFINITE std::numeric_limits<float>::infinity()

using std::max;
using std::min;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx;

uint4 shared_ring[1 << 14];

namespace emulated {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 256 << 10;

struct Copy { void* to; const char* from; int size; bool wanted; };

struct Lane {
  ucontext_t context;
  // Not filled: of 128 MB in each library only what a kernel touches is to become memory.
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  int meetings = 0;
  bool at_barrier = false, done = false;
};

constexpr int MOST_WARPS = 16;

struct Warp {
  Lane lanes[LANES];
  int said_kind[2][LANES];
  unsigned said[2][LANES][16];
};

static Warp warps[MOST_WARPS];
static ucontext_t home;
static int team, current;  // the warp, and the lane of it

inline Lane& lane_now() { return warps[team].lanes[current]; }

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s\n", why);
  std::abort();
}

inline void give_way() {
  swapcontext(&lane_now().context, &home);
}

// Says `count` words to the other lanes; all of them have spoken when it returns.
inline const unsigned (*meet(int kind, const unsigned* words, int count))[16] {
  Warp& mine = warps[team];
  const int side = lane_now().meetings++ & 1;
  mine.said_kind[side][current] = kind;
  std::memcpy(mine.said[side][current], words, count * sizeof(unsigned));
  give_way();
  for (int i = 0; i < LANES; ++i)
    if (mine.said_kind[side][i] != kind) fail("lanes meet at different operations");
  return mine.said[side];
}

template <class T>
unsigned bits(T value) {
  unsigned word;
  static_assert(sizeof(T) == 4);
  std::memcpy(&word, &value, 4);
  return word;
}

template <class T>
T value_of(unsigned word) {
  T value;
  std::memcpy(&value, &word, 4);
  return value;
}

}  // namespace emulated

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  const unsigned word = emulated::bits(value);
  return emulated::value_of<T>(emulated::meet(1, &word, 1)[lane & 31][0]);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  const int mine = emulated::current;
  const unsigned word = emulated::bits(value);
  return emulated::value_of<T>(emulated::meet(100 + other, &word, 1)[mine ^ other][0]);
}

inline void __syncwarp() {
  const unsigned nothing = 0;
  emulated::meet(2, &nothing, 1);
}

// All warps come here, or end.
inline void __syncthreads() {
  __syncwarp();
  emulated::lane_now().at_barrier = true;
  emulated::give_way();
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = a | (uint64_t)b << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float power_of_two(float x) { return std::exp2(x); }
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}

inline void copy_bytes_ahead(void* to, const char* from, int size, bool wanted) {
  if ((uintptr_t)to % size || (uintptr_t)from % size) emulated::fail("a copy is not on its size");
  std::memset(to, 0xff, size);
  emulated::lane_now().open.push_back({to, from, size, wanted});
}

inline void copy_ahead_if(uint4* to, const char* from, bool wanted) {
  copy_bytes_ahead(to, from, 16, wanted);
}

inline void copy_word_ahead_if(unsigned* to, const char* from, bool wanted) {
  copy_bytes_ahead(to, from, 4, wanted);
}

inline void copy_ahead(uint4* to, const char* from) { copy_ahead_if(to, from, true); }

inline void end_step_of_copies() {
  auto& lane = emulated::lane_now();
  lane.groups.push_back(std::move(lane.open));
  lane.open.clear();
}

template <int NEWER>
void wait_for_copies() {
  auto& groups = emulated::lane_now().groups;
  for (; groups.size() > NEWER; groups.pop_front())
    for (const auto& copy : groups.front()) {
      if (copy.wanted)
        std::memcpy(copy.to, copy.from, copy.size);
      else
        std::memset(copy.to, 0, copy.size);
    }
}

inline float number(uint16_t bits) {
#if BFLOAT16
  return emulated::value_of<float>((unsigned)bits << 16);
#else
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return (float)half;
#endif
}

inline uint16_t rounded(float x) {
#if BFLOAT16
  const unsigned word = emulated::bits(x);
  if (std::isnan(x)) return 0x7fff;
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
#else
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#endif
}

inline float low(unsigned pair) { return number((uint16_t)pair); }
inline float high(unsigned pair) { return number((uint16_t)(pair >> 16)); }
inline unsigned pack(float first, float second) {
  return rounded(first) | (unsigned)rounded(second) << 16;
}

inline float low_half(unsigned pair) {
  const uint16_t bits = (uint16_t)pair;
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return (float)half;
}

inline float high_half(unsigned pair) { return low_half(pair >> 16); }

inline unsigned pack_halves(float first, float second) {
  const _Float16 halves[] = {(_Float16)first, (_Float16)second};
  unsigned pair;
  std::memcpy(&pair, halves, 4);
  return pair;
}

inline unsigned subtract_halves(unsigned a, unsigned b) {
  return pack_halves(low_half(a) - low_half(b), high_half(a) - high_half(b));
}

inline float number_of_e4m3(unsigned code) {
  const int exponent = code >> 3 & 15, digits = code & 7;
  float value = exponent ? std::ldexp(8.0f + digits, exponent - 10) : std::ldexp(digits, -9);
  if ((code & 0x7f) == 0x7f) value = std::nanf("");
  return code & 0x80 ? -value : value;
}

inline unsigned halves_of_e4m3(unsigned codes) {
  return pack_halves(number_of_e4m3(codes & 0xff), number_of_e4m3(codes >> 8 & 0xff));
}

// The nearest code, of two the even one, by looking at all of them.
inline unsigned code_of_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const float size = std::fabs(x);
  unsigned best = 0;
  for (unsigned code = 1; code < 0x7f; ++code) {
    const float now = std::fabs(number_of_e4m3(code) - size);
    const float before = std::fabs(number_of_e4m3(best) - size);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

inline unsigned e4m3_of(float first, float second) {
  return code_of_e4m3(first) | code_of_e4m3(second) << 8;
}

inline float log_two(float x) { return std::log2(x); }
inline int nearest(float x) { return (int)std::nearbyint(x); }

#if BITS == 16
inline float low_factor(unsigned pair) { return low(pair); }
inline float high_factor(unsigned pair) { return high(pair); }
#else
inline float low_factor(unsigned pair) { return low_half(pair); }
inline float high_factor(unsigned pair) { return high_half(pair); }
#endif

// As PTX describes the fragments of mma.m16n8k16 for 16-bit types.
inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
  const int mine = emulated::current;
  const unsigned words[] = {a0, a1, a2, a3, b0, b1};
  const auto said = emulated::meet(3, words, 6);
  for (int i = 0; i < 4; ++i) {
    const int row = mine / 4 + i / 2 * 8, column = mine % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned a = said[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const unsigned b = said[column * 4 + k % 8 / 2][4 + k / 8];
      c[i] += (k % 2 ? high_factor(a) : low_factor(a)) * (k % 2 ? high_factor(b) : low_factor(b));
    }
  }
}

inline unsigned transpose(unsigned pair) {
  const int mine = emulated::current, row = mine / 4;
  const auto said = emulated::meet(4, &pair, 1);
  unsigned result = 0;
  for (int i = 0; i < 2; ++i) {
    const unsigned from = said[(mine % 4 * 2 + i) * 4 + row / 2][0];
    result |= (from >> row % 2 * 16 & 0xffff) << 16 * i;
  }
  return result;
}

inline void fetch(const void*) {}
inline float4 load_part(const float* at) { return *(const float4*)at; }
inline float load_number_of_part(const float* at) { return *at; }
inline int arrive(int* counter) { return (*counter)++; }

namespace emulated {

static void (*body)();

inline void lane_main() {
  body();
  lane_now().done = true;
  give_way();
}

inline void begin_warp() {
  for (auto& lane : warps[team].lanes) {
    lane.open.clear(), lane.groups.clear(), lane.meetings = 0;
    lane.at_barrier = lane.done = false;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = STACK_BYTES;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
}

// Up to the next barrier or the end; how many lanes are not at the end.
inline int run_warp(unsigned x, unsigned y) {
  for (;;) {
    int alive = 0, waiting = 0;
    for (current = 0; current < LANES; ++current) {
      Lane& lane = lane_now();
      if (lane.done) continue;
      threadIdx = {(unsigned)(team * LANES + current), 0, 0};
      blockIdx = {x, y, 0};
      swapcontext(&home, &lane.context);
      alive += !lane.done;
      waiting += lane.at_barrier;
    }
    if (alive && alive != LANES) fail("some lanes have ended, others have not");
    if (waiting && waiting != LANES) fail("some lanes are at a barrier, others are not");
    if (!alive || waiting) return alive;
  }
}

inline void run_block(int num_warps, unsigned x, unsigned y) {
  if (num_warps > MOST_WARPS) fail("too many warps");
  for (team = 0; team < num_warps; ++team) begin_warp();
  for (int alive = 1; alive;) {
    alive = 0;
    for (team = 0; team < num_warps; ++team) {
      for (auto& lane : warps[team].lanes) lane.at_barrier = false;
      if (!warps[team].lanes[0].done) alive += run_warp(x, y);
    }
  }
}

}  // namespace emulated
