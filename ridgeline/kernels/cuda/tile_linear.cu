// y = epilogue(x @ W.T) for some rows of x, by warpgroup products: W is the tall operand.
//
// A tile is ROWS rows of W times COLUMNS rows of x; its sums stay in registers of WARPGROUPS
// warpgroups, BANDS bands of 64 rows of W each. Two threads call tiles of W and of x into a ring of
// STAGES in shared memory (the copy engine; BLOCKS blocks of 128 bytes of each row a step), those
// of W without a wait for the kernel before. The steps of all tiles are one line that is cut evenly
// among the programs. Where a cut falls into a tile, the program with its first steps finishes it:
// it waits for the sums of the others, which go through `partial` and `arrivals`, and adds them in
// the order of K. With SPLITS each tile has a cluster of its own instead, which shares K: its
// blocks exchange their sums, and each finishes some rows of x. CLUSTER blocks are one program:
// each has its own rows of W, and sends a share of x to all of them. Same input, same bits.
//
// Compiled with: ELEMENT 0 bfloat16, 1 float16, 2 e4m3, 4 int8 (these with a scale of each row of x
// and W); ROWS, COLUMNS, STAGES, BLOCKS, WARPGROUPS, CLUSTER, SPLITS; GATED, RESIDUAL, BIAS, DEPENDENT
// (programmatic launch) 0 or 1. OUT: element of y, residual, bias: 0 or 1, or 2 float32, with no
// residual and no bias then; W_SCALE: scales of W are 0 float32, 1 bfloat16, 2 float16. Sums of int8
// are exact, so no cut of the work changes a bit.
// PACKED 1: W has 4 bits and what `int4_record.cu` says; ELEMENT is that of x, BLOCKS are 2.
// Letters as in small_linear: M rows of x, K inputs, N rows of W, O outputs (`width`).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef PACKED
#define PACKED 0
#endif
#define BANDS (ROWS / 64 / WARPGROUPS)
#define SUMS (COLUMNS / 2)  // of a thread and band
#define WIDE (WARPGROUPS == 2 && BANDS * SUMS > 96)  // loading warps give registers away
#define THREADS (WARPGROUPS * 128 + (WIDE ? 128 : 64))
#if PACKED  // the left operand takes registers too
#define PROGRAMS_EACH (BANDS * SUMS <= (WARPGROUPS == 1 ? 64 : 16) ? 2 : 1)  // of a multiprocessor
#else
#define PROGRAMS_EACH (WARPGROUPS == 1 || BANDS * SUMS <= 32 ? 2 : 1)
#endif
#define W_BYTES (ROWS * 128)
#define X_BYTES (COLUMNS * 128)
#if PACKED
#define W_ROOM ((ROWS / 16 * RECORD + 1023) / 1024 * 1024)  // of a stage
#else
#define W_ROOM (BLOCKS * W_BYTES)
#endif
#define STAGE_BYTES (W_ROOM + BLOCKS * X_BYTES)
#define BLOCK_NUMBERS (ELEMENT >= 2 ? 128 : 64)
#define INTEGER (ELEMENT == 4)
#define PART (COLUMNS / SPLITS > 8 ? COLUMNS / SPLITS : 8)  // rows of x that a block finishes,
#define FINISHERS (COLUMNS / PART)  // of so many blocks of a cluster along K
#define CHUNK (PART % 32 == 0 ? 32 : PART % 16 == 0 ? 16 : 8)  // that leave together
#define BAND_OUTPUTS (GATED ? 32 : 64)
#define PITCH (BAND_OUTPUTS + 4)
#define STAGING (CHUNK * PITCH)
#define TOGETHER (OUT == 2 ? 4 : 8)  // outputs in 16 bytes
#define VECTORS (CHUNK * BAND_OUTPUTS / TOGETHER)  // of so many, of a chunk
#define VECTORS_EACH ((VECTORS + 127) / 128)
#define WARP_ARRIVALS (WARPGROUPS * 4 * CLUSTER)

#if OUT == 2
typedef float Out;
#else
typedef u16 Out;
#endif
#if INTEGER
typedef int Sum;
typedef int4 Sums4;
#define IN_OUT "+r"
#define OUT_OF "=r"
#define INTO "r"
#define SUM_TYPE "s32"
#else
typedef float Sum;
typedef float4 Sums4;
#define IN_OUT "+f"
#define OUT_OF "=f"
#define INTO "f"
#define SUM_TYPE "f32"
#endif

struct __align__(64) Map {
  u64 words[16];
};

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

// "%0,%1,...": operands of a product, and what follows them.
#define L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L16 L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L24 L16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define L32 L24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define L40 L32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L48 L40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L56 L48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define L64 L56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define L72 L64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define L80 L72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define L88 L80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define L96 L88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define L104 L96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define L112 L104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define L120 L112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define L128 L120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define D8(i)                                                                                \
  IN_OUT(d[i]), IN_OUT(d[i + 1]), IN_OUT(d[i + 2]), IN_OUT(d[i + 3]), IN_OUT(d[i + 4]),      \
      IN_OUT(d[i + 5]), IN_OUT(d[i + 6]), IN_OUT(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#if COLUMNS == 16
#define OPERANDS "{" L8 "}, %8, %9, p"
#define KEEP "%10"
#define RESULTS D8(0)
#elif COLUMNS == 32
#define OPERANDS "{" L16 "}, %16, %17, p"
#define KEEP "%18"
#define RESULTS D16(0)
#elif COLUMNS == 64
#define OPERANDS "{" L32 "}, %32, %33, p"
#define KEEP "%34"
#define RESULTS D32(0)
#elif COLUMNS == 96
#define OPERANDS "{" L48 "}, %48, %49, p"
#define KEEP "%50"
#define RESULTS D32(0), D16(32)
#elif COLUMNS == 128
#define OPERANDS "{" L64 "}, %64, %65, p"
#define KEEP "%66"
#define RESULTS D64(0)
#elif COLUMNS == 192
#define OPERANDS "{" L96 "}, %96, %97, p"
#define KEEP "%98"
#define RESULTS D64(0), D32(64)
#elif COLUMNS == 256
#define OPERANDS "{" L128 "}, %128, %129, p"
#define KEEP "%130"
#define RESULTS D64(0), D64(64)
#endif
#if ELEMENT == 0
#define SHAPE "m64n" TEXT(COLUMNS) "k16.f32.bf16.bf16 " OPERANDS ", 1, 1, 0, 0;"
#elif ELEMENT == 1
#define SHAPE "m64n" TEXT(COLUMNS) "k16.f32.f16.f16 " OPERANDS ", 1, 1, 0, 0;"
#elif ELEMENT == 2
#define SHAPE "m64n" TEXT(COLUMNS) "k32.f32.e4m3.e4m3 " OPERANDS ", 1, 1;"
#else
#define SHAPE "m64n" TEXT(COLUMNS) "k32.s32.s8.s8 " OPERANDS ";"
#endif

// d = a @ b.T, on top of d if `keep`; a and b as `described`, 32 bytes of each row.
__device__ __forceinline__ void multiply(Sum (&d)[SUMS], u64 a, u64 b, u32 keep) {
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, " KEEP ", 0;\n"
               "wgmma.mma_async.sync.aligned." SHAPE "}"
               : RESULTS
               : "l"(a), "l"(b), "r"(keep)
               : "memory");
}

// Rows of 128 bytes, in eights that the copy engine has swizzled.
__device__ __forceinline__ u64 described(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ u32 shared_place(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void make_barrier(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
#if CLUSTER > 1
  asm volatile(
      "{.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void all_meet() {
#if CLUSTER * SPLITS > 1
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void warpgroup_meets(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

#if PACKED
#include "int4_tile.cu"
#endif

#if GATED
#define AT "[%1, {%3, %4, %4, %5}]"
#define AXES "4d"
#else
#define AT "[%1, {%3, %5}]"
#define AXES "2d"
#endif

// A block of rows of W; gated: eight of gate, eight of up, and so on.
__device__ __forceinline__ void send_weights(u32 to, const Map* map, u32 barrier, int column,
                                             int row, u64 policy) {
  asm volatile("cp.async.bulk.tensor." AXES
               ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], " AT
               ", [%2], %6;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(GATED ? row / 16 : row), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void send_rows(u32 to, const Map* map, u32 barrier, int column, int row,
                                          u64 policy) {
#if CLUSTER > 1
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((u16)((1 << CLUSTER) - 1)), "l"(policy)
      : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ float number(u32 bits) {
  float f;
#if OUT == 0
  f = __uint_as_float(bits << 16);
#else
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits & 0xffff));
#endif
  return f;
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 pair;
#if OUT == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

__device__ __forceinline__ u32 add_pair(u32 pair, float& first, float& second) {
  first += number(pair);
  second += number(pair >> 16);
  return pack(first, second);
}

#if ELEMENT >= 2
__device__ __forceinline__ float scale_of(const void* scales, int row) {
#if W_SCALE == 0
  return __ldg((const float*)scales + row);
#elif W_SCALE == 1
  return __uint_as_float((u32)__ldg((const u16*)scales + row) << 16);
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(__ldg((const u16*)scales + row)));
  return f;
#endif
}
#endif

template <int N>
struct Number {
  static constexpr int value = N;
};

#if SPLITS > 1
// Each block of the cluster sends to each other the sums of the columns that the other finishes,
// into the rings, which are empty by now, and adds what it is sent, in the order of K. Where there
// are more blocks than eights of rows of x, the last ones only send.
template <typename Finish>
__device__ __forceinline__ void finish_by_all(Sum (&sums)[BANDS][SUMS], int mine, u32 ring,
                                              int inside, int warpgroup, Finish finish) {
  const u32 own = ring + (warpgroup * SPLITS * BANDS * PART / 8 * 128 + inside) * 16;
  all_meet();
#pragma unroll
  for (int to = 0; to < FINISHERS; ++to) {
    if (to == mine) continue;
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(own + mine * (BANDS * PART / 8 * 2048)), "r"(to));
#pragma unroll
    for (int i = 0; i < BANDS * PART / 2; i += 4) {
      const Sum* s = &sums[i / (PART / 2)][to * (PART / 2) + i % (PART / 2)];
      asm volatile("st.shared::cluster.v4." SUM_TYPE " [%0], {%1, %2, %3, %4};"
                   ::"r"(there + i / 4 * 2048), INTO(s[0]), INTO(s[1]), INTO(s[2]), INTO(s[3])
                   : "memory");
    }
  }
  all_meet();
  auto add = [&](auto which) {
    constexpr int part = decltype(which)::value;
    if (part != mine) return;
#pragma unroll
    for (int i = 0; i < BANDS * PART / 2; i += 4) {
      Sum* s = &sums[i / (PART / 2)][part * (PART / 2) + i % (PART / 2)];
      Sum total[4];
#pragma unroll
      for (int from = 0; from < SPLITS; ++from) {
        Sum v[4] = {s[0], s[1], s[2], s[3]};
        if (from != part) {
          asm volatile("ld.shared.v4." SUM_TYPE " {%0, %1, %2, %3}, [%4];"
                       : OUT_OF(v[0]), OUT_OF(v[1]), OUT_OF(v[2]), OUT_OF(v[3])
                       : "r"(own + from * (BANDS * PART / 8 * 2048) + i / 4 * 2048)
                       : "memory");
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) total[n] = from == 0 ? v[n] : total[n] + v[n];
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) s[n] = total[n];
    }
    finish(which);
  };
  add(Number<0>());
#if FINISHERS > 1
  add(Number<1>());
#endif
#if FINISHERS > 2
  add(Number<2>());
  add(Number<3>());
#endif
#if FINISHERS > 4
  add(Number<4>());
  add(Number<5>());
  add(Number<6>());
  add(Number<7>());
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS_EACH)
    tile_linear(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, Out* y,
                const u16* residual, const u16* __restrict__ bias, const float* x_scale,
                const void* __restrict__ w_scale, float* partial, u32* arrivals, int rows,
                int width, int x_tiles, int tiles, int steps, u64 residual_stride, u64 y_stride) {
  extern __shared__ __align__(1024) char room[];
  float* staging = (float*)(room + STAGES * STAGE_BYTES);
  u64* barriers = (u64*)(staging + WARPGROUPS * STAGING);
  const u32 ring = shared_place(room), full = shared_place(barriers), free = full + STAGES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long total = (long long)tiles * steps;
#if SPLITS > 1
  const int share_of_k = blockIdx.x % SPLITS, opening = blockIdx.x / SPLITS * steps;
  const int begin = opening + steps * share_of_k / SPLITS;
  const int end = opening + steps * (share_of_k + 1) / SPLITS;
  const int programs = 1, program = 0, rank = 0;
#else
  // Parts of tiles are finished by programs with lower numbers, and waited for: by later blocks.
  const int programs = gridDim.x / CLUSTER, program = programs - 1 - blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const int begin = (int)(total * program / programs);
  const int end = (int)(total * (program + 1) / programs);
#endif

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      make_barrier(full + i * 8, 2);
      make_barrier(free + i * 8, WARP_ARRIVALS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
#if CLUSTER > 1
  all_meet();
#else
  __syncthreads();
#endif

  if (warp >= WARPGROUPS * 4) {
#if WIDE
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    // One thread of a warp sends for weights, and one of the next warp for rows of x.
    const bool of_weights = warp == WARPGROUPS * 4;
    if (warp < WARPGROUPS * 4 + 2 && lane == 0) {
      u64 policy;
      const Map* map = of_weights ? &w_map : &x_map;
      asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      if (of_weights)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      else
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      const int share = COLUMNS / CLUSTER * rank;
      int tile = begin / steps, step = begin - tile * steps, slot = 0;
      u32 parity = 1;
#if DEPENDENT
      if (!of_weights) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      }
#endif
      for (int i = begin; i < end; ++i) {
        wait_for(free + slot * 8, parity);
        const u32 barrier = full + slot * 8;
        u32 to = ring + slot * STAGE_BYTES;
        if (of_weights) {
          const int row = (tile / x_tiles * CLUSTER + rank) * ROWS;
#if PACKED
          send_records(to, map, barrier, row / ROWS, step, policy);
#else
          expect(barrier, BLOCKS * W_BYTES);
#pragma unroll
          for (int n = 0; n < BLOCKS; ++n) {
            send_weights(to + n * W_BYTES, map, barrier, (step * BLOCKS + n) * BLOCK_NUMBERS, row,
                         policy);
          }
#endif
        } else {
          const int row = tile % x_tiles * COLUMNS + share;
          to += W_ROOM + share * 128;
          expect(barrier, BLOCKS * X_BYTES);
#pragma unroll
          for (int n = 0; n < BLOCKS; ++n) {
            send_rows(to + n * X_BYTES, map, barrier, (step * BLOCKS + n) * BLOCK_NUMBERS, row,
                      policy);
          }
        }
        if (++step == steps) {
          step = 0;
          ++tile;
        }
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
#if SPLITS > 1
    all_meet();
    all_meet();
#endif
  } else {
#if WIDE
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
#if DEPENDENT
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const int warpgroup = warp / 4, inside = threadIdx.x % 128, g = lane / 4, t = lane % 4;
    float* own = staging + warpgroup * STAGING;
#if PACKED
    const u32 opens_of_codes = opens_of_launch();
#endif
    Sum sums[BANDS][SUMS];
    int slot = 0;
    u32 parity = 0;
    auto release = [&](int which) {
      if (lane < CLUSTER) arrive_at(free + which * 8, lane);
    };
    for (int at = begin; at < end;) {
      const int tile = at / steps, first = at - tile * steps;
      const int last = end - tile * steps < steps ? end - tile * steps : steps;
      int before = -1;
      for (int step = first; step < last; ++step) {
        wait_for(full + slot * 8, parity);
        const u32 from = ring + slot * STAGE_BYTES;
#if PACKED
        const char* stage = room + slot * STAGE_BYTES;
        const u64 x_at = described(from + W_ROOM);
        // Each block becomes numbers while the products of the one before run.
        Lane codes[BANDS];
#pragma unroll
        for (int band = 0; band < BANDS; ++band)
          codes[band] = Lane(stage, warpgroup * BANDS + band, warp, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          u32 a[BANDS][4][4];
#pragma unroll
          for (int band = 0; band < BANDS; ++band) {
            codes[band].operands(a[band], block, opens_of_codes);
            settle(a[band]);
          }
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int band = 0; band < BANDS; ++band) {
              multiply_packed(sums[band], a[band][i], x_at + (block * X_BYTES + i * 32) / 16,
                              step > first || block > 0 || i > 0);
            }
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (block == 0 && before >= 0) release(before);
        }
#else
        const u64 w_at = described(from + warpgroup * BANDS * 64 * 128);
        const u64 x_at = described(from + BLOCKS * W_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < BLOCKS * 4; ++i) {
#pragma unroll
          for (int band = 0; band < BANDS; ++band) {
            multiply(sums[band], w_at + (i / 4 * W_BYTES + band * 64 * 128 + i % 4 * 32) / 16,
                     x_at + (i / 4 * X_BYTES + i % 4 * 32) / 16, step > first || i > 0);
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (before >= 0) release(before);
#endif
        before = slot;
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      release(before);
      at += last - first;
#if SPLITS == 1
      Sums4* const parts = (Sums4*)partial + inside;
      const int place = rank * WARPGROUPS + warpgroup;
      auto part = [&](int of) {
        return parts + (u64)(of * CLUSTER * WARPGROUPS + place) * (BANDS * SUMS * 32);
      };
      u32* const counter = arrivals + tile * CLUSTER * WARPGROUPS + place;
      if (first > 0) {
        Sums4* mine = part(program);
#pragma unroll
        for (int i = 0; i < BANDS * SUMS; i += 4) {
          const Sum* s = &sums[i / SUMS][i % SUMS];
          __stcg(mine + i / 4 * 128, Sums4{s[0], s[1], s[2], s[3]});
        }
        warpgroup_meets(warpgroup);
        if (inside == 0)
          asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        continue;
      }
      if (last < steps) {
        // Programs with higher numbers are in lower blocks, which have begun before this one.
        const int newest = (int)((((long long)tile + 1) * steps * programs - 1) / total);
        if (inside == 0) {
          u32 there;
          do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(there)
                         : "l"(counter)
                         : "memory");
          } while (there != newest - program);
          *counter = 0;
        }
        warpgroup_meets(warpgroup);
        for (int of = program + 1; of <= newest; ++of) {
          const Sums4* from = part(of);
#pragma unroll
          for (int i = 0; i < BANDS * SUMS; i += 4) {
            const Sums4 v = __ldcg(from + i / 4 * 128);
            Sum* s = &sums[i / SUMS][i % SUMS];
            s[0] += v.x;
            s[1] += v.y;
            s[2] += v.z;
            s[3] += v.w;
          }
        }
      }

#endif

      auto finish = [&](auto which) {
        constexpr int from_column = decltype(which)::value * PART;
        const int first_row = tile % x_tiles * COLUMNS;
#pragma unroll
        for (int band = 0; band < BANDS; ++band) {
          const int block = tile / x_tiles * CLUSTER + rank;
          const int opens = (block * (ROWS / 64) + warpgroup * BANDS + band) * BAND_OUTPUTS;
          // Of this lane's rows g and g + 8 of a warp's 16 of W: outputs, or gate and up of one.
#if GATED
          const int output = opens + warp % 4 * 8 + g, second = output + width;
#else
          const int output = opens + warp % 4 * 16 + g, second = output + 8;
#endif
          const bool known = output < width, both = GATED ? known : second < width;
#if BIAS
          const float upper_bias = known ? number(bias[output]) : 0.0f;
          const float lower_bias = both ? number(bias[second]) : 0.0f;
#endif
#if ELEMENT >= 2
          const float upper_scale = known ? scale_of(w_scale, output) : 0.0f;
          const float lower_scale = both ? scale_of(w_scale, second) : 0.0f;
#endif
          uint4 added[VECTORS_EACH], next_added[VECTORS_EACH];
          auto fetch_residual = [&](int chunk) {
#pragma unroll
            for (int i = 0; i < VECTORS_EACH; ++i) {
              const int e = i * 128 + inside;
              const int m = first_row + chunk + e / (BAND_OUTPUTS / TOGETHER);
              const int o = opens + e % (BAND_OUTPUTS / TOGETHER) * TOGETHER;
              next_added[i] = make_uint4(0, 0, 0, 0);
              if (RESIDUAL && e < VECTORS && m < rows && o < width)
                next_added[i] = __ldcg((const uint4*)(residual + m * residual_stride + o));
            }
          };
          fetch_residual(from_column);
#pragma unroll
          for (int chunk = from_column; chunk < from_column + PART; chunk += CHUNK) {
#pragma unroll
            for (int i = 0; i < VECTORS_EACH; ++i) added[i] = next_added[i];
            if (chunk + CHUNK < from_column + PART) fetch_residual(chunk + CHUNK);
#pragma unroll
            for (int j = chunk / 8; j < (chunk + CHUNK) / 8; ++j) {
              // A row of int8 has the same bits by any kernel, so each step is rounded apart.
              float a = (float)sums[band][j * 4], b = (float)sums[band][j * 4 + 1];
              float c = (float)sums[band][j * 4 + 2], d = (float)sums[band][j * 4 + 3];
#if ELEMENT >= 2
              const int m = first_row + j * 8 + t * 2;
              const float even = m < rows ? __ldcg(x_scale + m) : 0.0f;
              const float odd = m + 1 < rows ? __ldcg(x_scale + m + 1) : 0.0f;
              a = __fmul_rn(a, even * upper_scale);
              b = __fmul_rn(b, odd * upper_scale);
              c = __fmul_rn(c, even * lower_scale);
              d = __fmul_rn(d, odd * lower_scale);
#endif
#if BIAS
              a += upper_bias;
              b += upper_bias;
              c += lower_bias;
              d += lower_bias;
#endif
              float* to = own + (j * 8 - chunk + t * 2) * PITCH;
#if GATED
              to += warp % 4 * 8 + g;
              to[0] = __fdividef(a, 1.0f + __expf(-a)) * c;
              to[PITCH] = __fdividef(b, 1.0f + __expf(-b)) * d;
#else
              to += warp % 4 * 16 + g;
              to[0] = a;
              to[PITCH] = b;
              to[8] = c;
              to[PITCH + 8] = d;
#endif
            }
            warpgroup_meets(warpgroup);
#pragma unroll
            for (int i = 0; i < VECTORS_EACH; ++i) {
              const int e = i * 128 + inside, r = e / (BAND_OUTPUTS / TOGETHER);
              const int m = first_row + chunk + r, v = e % (BAND_OUTPUTS / TOGETHER) * TOGETHER;
              if (e < VECTORS && m < rows && opens + v < width) {
#if OUT == 2
                *(float4*)(y + m * y_stride + opens + v) = *(const float4*)(own + r * PITCH + v);
#else
                float4 l = *(const float4*)(own + r * PITCH + v);
                float4 h = *(const float4*)(own + r * PITCH + v + 4);
                const uint4 out = make_uint4(
                    add_pair(added[i].x, l.x, l.y), add_pair(added[i].y, l.z, l.w),
                    add_pair(added[i].z, h.x, h.y), add_pair(added[i].w, h.z, h.w));
                *(uint4*)(y + m * y_stride + opens + v) = out;
#endif
              }
            }
            warpgroup_meets(warpgroup);
          }
        }
      };
#if SPLITS == 1
      finish(Number<0>());
#else
      finish_by_all(sums, share_of_k, ring, inside, warpgroup, finish);
#endif
    }
  }
#if CLUSTER > 1
  all_meet();  // nothing is sent to one that has ended
#endif

}
