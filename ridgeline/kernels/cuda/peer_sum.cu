// Sums of small messages over ranks, each with a GPU, in one kernel; with NORM the sum goes to the
// residual and comes out normed; with GATHER nothing is added up.
//
// Every rank has memory that the others write to. A CTA takes some rows of the message. It writes
// them into the place for this rank and CTA in the memory of each other rank, then reads what the
// others have written to its own, adds up in the order of ranks and rounds once. Four bytes travel
// with the number of the call in the other half of a word of eight, which is written and read at
// once: who sees the number has the bytes, without a fence or a second way through the link.
// The number is counted here for each CTA, so replays of a captured step go on counting. Places
// alternate: call n + 2 writes where n did. Who writes it has ended n + 1, for which it needed
// words of that CTA of every other rank, each from a kernel that began when the one of call n had
// ended. So n has been read.
//
// A wait ends when the host says that a rank is gone (what is computed then is of no use), and traps
// after `timeout_ns`.
//
// Compiled with: ELEMENT 0 bfloat16, 1 float16, 2 float32; RANKS; THREADS; PACKS of 16 bytes of a row
// for each thread; CTAS and SLOT_PACKS: places of a rank, and 16 bytes of message in each; NORM, GATHER
// and DEPENDENT (programmatic launch) 0 or 1.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define SPINS 1024  // between two looks at the clock
#if ELEMENT == 2
#define WIDTH 4
#else
#define WIDTH 8
#endif

struct __align__(16) Pack {
  u32 word[4];
};

struct Peers {
  char* at[RANKS];
};

__device__ __forceinline__ float widen(u32 bits) {
#if ELEMENT == 0
  return __uint_as_float(bits << 16);
#elif ELEMENT == 1
  float wide;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(wide) : "h"((u16)bits));
  return wide;
#else
  return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ u32 narrow(float wide) {
#if ELEMENT == 0
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
  return bits;
#elif ELEMENT == 1
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
  return bits;
#else
  return __float_as_uint(wide);
#endif
}

__device__ __forceinline__ void widen_pack(const Pack& pack, float* wide) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    wide[i] = widen(WIDTH == 4 ? pack.word[i / (WIDTH / 4)]
                               : pack.word[i / (WIDTH / 4)] >> (i % (WIDTH / 4) * 16) & 0xffffu);
}

__device__ __forceinline__ Pack narrow_pack(const float* wide) {
  Pack pack;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    pack.word[w] = WIDTH == 4 ? narrow(wide[w * (WIDTH / 4)])
                              : narrow(wide[w * (WIDTH / 4)]) |
                                    narrow(wide[w * (WIDTH / 4) + WIDTH / 4 - 1]) << 16;
  return pack;
}

__device__ __forceinline__ void send(char* to, u32 first, u32 second, u32 call) {
  const u64 tag = (u64)call << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(tag | first),
               "l"(tag | second)
               : "memory");
}

struct Patience {
  const u32* abandoned;
  u64 timeout_ns;

  __device__ __forceinline__ bool is_over(u64& begun) const {
    u64 now;
    u32 gone;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(gone) : "l"(abandoned) : "memory");
    if (gone) return true;
    if (!begun) begun = now;
    if (now - begun > timeout_ns) asm volatile("trap;");
    return false;
  }
};

// Both halves of 16 bytes are asked for at once.
__device__ __forceinline__ Pack receive(const char* from, u32 call, const Patience& patience) {
  u64 word[4], begun = 0;
  for (u32 spins = 1;; ++spins) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                   : "=l"(word[2 * half]), "=l"(word[2 * half + 1])
                   : "l"(from + half * (SLOT_PACKS * 16))
                   : "memory");
    bool is_here = true;
#pragma unroll
    for (int w = 0; w < 4; ++w) is_here &= (u32)(word[w] >> 32) == call;
    if (is_here || (spins % SPINS == 0 && patience.is_over(begun))) break;
  }
  Pack pack;
#pragma unroll
  for (int w = 0; w < 4; ++w) pack.word[w] = (u32)word[w];
  return pack;
}

// What `source` writes for this CTA, in the memory that begins at `memory`.
__device__ __forceinline__ char* place(char* memory, u32 call, int source) {
  const u64 slot = ((u64)(call & 1) * RANKS + source) * CTAS + blockIdx.x;
  return memory + slot * (SLOT_PACKS * 32);
}

__device__ __forceinline__ Pack load(const Pack* from) {
  Pack pack;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(from)
               : "memory");
  return pack;
}

#if NORM
__device__ __forceinline__ float sum_of_block(float mine, float* shared) {
#pragma unroll
  for (int step = 16; step; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) total += shared[warp];
  return total;
}
#endif

// Rows of `row_packs`, the last one perhaps shorter, `total_packs` in all. Sums: in place, over x,
// which is also `out` of a plain sum. GATHER: `out_stride` is from rank to rank.
extern "C" __global__ void __launch_bounds__(THREADS)
    peer_sum(Pack* x, long long x_stride, Pack* residual, long long residual_stride,
             const Pack* weight, Pack* out, long long out_stride, float eps, int row_packs,
             long long total_packs, const __grid_constant__ Peers peers, u32* calls, const u32* abandoned, u64 timeout_ns,
             int rank) {
  const Patience patience{abandoned, timeout_ns};
#if NORM
  __shared__ float partial[2][THREADS / 32];
  Pack weights[PACKS];
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int p = threadIdx.x + k * THREADS;
    if (p < row_packs) weights[k] = weight[p];
  }
#endif
#if DEPENDENT
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const u32 call = *(volatile u32*)(calls + blockIdx.x) + 1;

  int held = 0;  // packs of this CTA before the row
  for (long long row = blockIdx.x; row * row_packs < total_packs; row += gridDim.x) {
    const long long left = total_packs - row * row_packs;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const int p = threadIdx.x + k * THREADS;
      if (p < row_packs && p < left) {
        const Pack pack = load(x + row * x_stride + p);
#pragma unroll
        for (int step = 1; step < RANKS; ++step) {
          const int to = (rank + step) % RANKS;
          char* there = place(peers.at[to], call, rank) + (u64)(held + p) * 16;
          send(there, pack.word[0], pack.word[1], call);
          send(there + SLOT_PACKS * 16, pack.word[2], pack.word[3], call);
        }
      }
    }
    held += row_packs;
  }

  held = 0;
#if NORM
  int parity = 0;
#endif
  for (long long row = blockIdx.x; row * row_packs < total_packs; row += gridDim.x) {
    const long long left = total_packs - row * row_packs;
#if NORM
    float kept[PACKS][WIDTH];
    float squares = 0;
#endif
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const int p = threadIdx.x + k * THREADS;
      if (p < row_packs && p < left) {
        const Pack own = load(x + row * x_stride + p);
#if NORM
        Pack* const there = residual + row * residual_stride + p;
        const Pack held_there = load(there);  // on its way while others are waited for
        float wide[WIDTH], before[WIDTH];
#elif !GATHER
        float wide[WIDTH];
#endif
#pragma unroll
        for (int source = 0; source < RANKS; ++source) {
          Pack pack = own;
          if (source != rank) {
            const char* here = place(peers.at[rank], call, source) + (u64)(held + p) * 16;
            pack = receive(here, call, patience);
          }
#if GATHER
          out[source * out_stride + row * row_packs + p] = pack;
#else
          float more[WIDTH];
          widen_pack(pack, more);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) wide[i] = source ? wide[i] + more[i] : more[i];
#endif
        }
#if NORM
        widen_pack(held_there, before);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) wide[i] += before[i];
        const Pack rounded = narrow_pack(wide);
        *there = rounded;
        widen_pack(rounded, kept[k]);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) squares += kept[k][i] * kept[k][i];
#elif !GATHER
        x[row * x_stride + p] = narrow_pack(wide);
#endif
      }
    }
#if NORM
    const float total = sum_of_block(squares, partial[parity]);
    parity ^= 1;
    const float scale = rsqrtf(total / (float)(row_packs * WIDTH) + eps);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const int p = threadIdx.x + k * THREADS;
      if (p < row_packs && p < left) {
        float by[WIDTH];
        widen_pack(weights[k], by);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) by[i] *= kept[k][i] * scale;
        out[row * row_packs + p] = narrow_pack(by);
      }
    }
#endif
    held += row_packs;
  }
  __syncthreads();
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}
