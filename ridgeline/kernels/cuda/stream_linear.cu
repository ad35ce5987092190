// y = epilogue(norm(x) @ W.T) for few rows of x: streams W once, as fast as memory gives it.
//
// A CTA owns groups of TILES * 16 rows of W over all of K (or, in a cluster of SPLITS, a share of K),
// its warps share K. A step of a warp is 128 bytes of each row of a group. The order in which products
// are added is free, so a lane takes from memory the very 16 bytes that it will multiply: of rows
// lane / 4 and lane / 4 + 8, at byte 16 * (lane % 4) of each half of the step. They come by cp.async
// into a ring that no other lane reads, so nothing is waited for but the copies themselves; the ring
// is filled before the wait for the kernel before, since weights depend on no kernel, and runs on
// from group to group. x takes the same places, from the L2 cache, a step ahead.
// Sums of the warps, then of the cluster, are added in their order: same input, same bits.
//
// Compiled with: ELEMENT 0 bfloat16, 1 float16, 2 e4m3 and 4 int8 (x too, with a scale of each row of
// x and W), 3 W of e4m3 and 5 of int8 with a scale of each row and x of bfloat16, which is rounded to
// the same here, with a scale for each 128 numbers; COLUMNS tiles of 8 rows of x, X_ROWS of them in
// the ring, 8 to a tile or 1, 2 or 4 that stand for all 8; TILES; STAGES of the ring; SPLITS; WARPS; NORM, GATED, RESIDUAL, BIAS, DEPENDENT (programmatic launch) 0 or 1; KEPT:
// what the first group of a CTA has rounded stays in shared memory for those after it. OUT: element
// of y, residual, bias: 0 or 1, or 2 float32; W_SCALE: scales of W are 0 float32, 1 bfloat16, 2
// float16. Sums of int8 are exact: whole numbers, of all of K if x is int8.
// Letters as in small_linear: M rows of x, K inputs, N rows of W, O outputs.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define THREADS (WARPS * 32)
#define STEP_BYTES 128
#define W_LOADS (TILES * 4)  // 16 bytes each, of a lane and step
#define ROWS (TILES * 16)  // of W in a group
#define WIDE (COLUMNS * 8 + 1)
#define ROUNDS (ELEMENT == 3 || ELEMENT == 5)
#define INTEGER (ELEMENT >= 4)
#define SCALED (ELEMENT >= 2)
#define PIECES (ROUNDS ? 2 : 1)  // 16 bytes of x beside 16 bytes of W
#define BUFFERS (KEPT && SPLITS == 1 ? 2 : 1)  // of sums: then all meet once a group
#define X_STEP_BYTES (STEP_BYTES * PIECES)
#define X_LINES (X_ROWS * PIECES)  // of 128 bytes in a step
#define LOADS (W_LOADS + (X_LINES + 3) / 4)
#if GATED
#define OUTPUTS (ROWS / 2)
#else
#define OUTPUTS ROWS
#endif

#if OUT == 2
typedef float Out;
#else
typedef u16 Out;
#endif
#if INTEGER
typedef int Sum;  // of a step that is rounded, else of all
#else
typedef float Sum;
#endif
#if INTEGER && !ROUNDS
typedef int Total;
#else
typedef float Total;
#endif

struct Words {
  u32 x, y, z, w;
};

__device__ __forceinline__ u32 shared_place(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// What is read once leaves the L2 cache first.
__device__ __forceinline__ void copy_ahead(u32 to, const char* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "l"(policy)
               : "memory");
}

// Past the L1 cache, as all cp.async here: it may hold what was there before the kernel before this
// one wrote. Zeros where there is nothing to be read.
__device__ __forceinline__ void copy_or_zero(u32 to, const char* from, bool known) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(known ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ Words read_shared(u32 at) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void write_shared(u32 at, const Words& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ Words read_constant(const char* at) {
  Words v;
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at));
  return v;
}

__device__ __forceinline__ float half_to_float(u32 bits) {
  float f;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits & 0xffff));
  return f;
}

template <int KIND>
__device__ __forceinline__ float low(u32 pair) {
  return KIND == 0 ? __uint_as_float(pair << 16) : half_to_float(pair);
}

template <int KIND>
__device__ __forceinline__ float high(u32 pair) {
  return KIND == 0 ? __uint_as_float(pair & 0xffff0000u) : half_to_float(pair >> 16);
}

template <int KIND>
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 pair;
  if (KIND == 0)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ float load_number(const Out* at) {
#if OUT == 2
  float number;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(number) : "l"(at) : "memory");
  return number;
#else
  u16 bits;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(at) : "memory");
  return low<OUT>((u32)bits);
#endif
}

#if SCALED
__device__ __forceinline__ float scale_of(const void* scales, int row) {
#if W_SCALE == 0
  return __ldg((const float*)scales + row);
#else
  return low<W_SCALE - 1>((u32)__ldg((const u16*)scales + row));
#endif
}
#endif

__device__ __forceinline__ void store_number(Out* at, float value) {
#if OUT == 2
  *at = value;
#else
  *at = (u16)(pack<OUT>(value, 0.0f) & 0xffff);
#endif
}

__device__ __forceinline__ void multiply(Sum (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
#if INTEGER
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
#if ELEMENT == 0
#define SHAPE "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#elif ELEMENT == 1
#define SHAPE "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define SHAPE "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
#endif
  asm volatile(SHAPE "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

#if ROUNDS
#define LARGEST (INTEGER ? 127.0f : 448.0f)
#define WHOLE 12582912.0f  // 1.5 * 2^23: what is added to it becomes a whole number
#define NO_SUM (INTEGER ? 0x4b400000 : 0)  // of int8: the bits of WHOLE, see `number_of`

// Of pairs of bfloat16 without their signs; NaN is the largest of all.
__device__ __forceinline__ u32 larger(u32 x, u32 y) {
  u32 both;
  asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
  return both;
}

__device__ __forceinline__ u32 largest_of(const Words& x) {
  const u32 no_signs = 0x7fff7fffu;
  return larger(larger(x.x & no_signs, x.y & no_signs), larger(x.z & no_signs, x.w & no_signs));
}

// Four numbers times `factor`, as codes.
__device__ __forceinline__ u32 rounded(u32 first, u32 second, float factor) {
#if INTEGER
  const u32 a = __float_as_uint(__fmaf_rn(low<0>(first), factor, WHOLE));
  const u32 b = __float_as_uint(__fmaf_rn(high<0>(first), factor, WHOLE));
  const u32 c = __float_as_uint(__fmaf_rn(low<0>(second), factor, WHOLE));
  const u32 d = __float_as_uint(__fmaf_rn(high<0>(second), factor, WHOLE));
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#else
  u16 lower, upper;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(lower)
      : "f"(high<0>(first) * factor), "f"(low<0>(first) * factor));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(upper)
      : "f"(high<0>(second) * factor), "f"(low<0>(second) * factor));
  return (u32)lower | (u32)upper << 16;
#endif
}

// A step's sum that began as NO_SUM: one of int8 is less than 2^21, so it is the mantissa of WHOLE
// and so much more.
__device__ __forceinline__ float number_of(Sum sum) {
#if INTEGER
  return __int_as_float(sum) - WHOLE;
#else
  return sum;
#endif
}
#endif

// Two bfloat16 times two, each product rounded once.
__device__ __forceinline__ u32 times(u32 x, u32 y) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

__device__ __forceinline__ void times_all(Words& x, const Words& y) {
  x.x = times(x.x, y.x);
  x.y = times(x.y, y.y);
  x.z = times(x.z, y.z);
  x.w = times(x.w, y.w);
}

#if NORM
__device__ __forceinline__ float squares_of_pair(u32 pair) {
  const float first = low<0>(pair), second = high<0>(pair);
  return first * first + second * second;
}

__device__ __forceinline__ float squares_of_all(const Words& x) {
  return squares_of_pair(x.x) + squares_of_pair(x.y) + squares_of_pair(x.z) + squares_of_pair(x.w);
}
#endif

// Where 16 bytes of a row of W lie in a step of the ring, and of a row of x.
__device__ __forceinline__ u32 place_of(int row, int vector) {
  return row * 128 + (vector ^ ((row & 1) << 2 | (row >> 1 & 3))) * 16;
}

__device__ __forceinline__ u32 x_place(int row, int vector) {
  return PIECES == 1 ? place_of(row, vector) : row * 256 + (vector ^ (row & 1)) * 16;
}

// Which row of W stands at row `row` of tile `tile` of a group; past the end the last one again.
__device__ __forceinline__ int weight_row(int group, int tile, int row, int width) {
#if GATED
  int inside = (group * (TILES / 2) + tile / 2) * 16 + row;
  return (inside < width ? inside : width - 1) + (tile & 1) * width;
#else
  int inside = (group * TILES + tile) * 16 + row;
  return inside < width ? inside : width - 1;
#endif
}

#if INTEGER && !ROUNDS
__device__ __forceinline__ Total total_of_bits(u32 bits) { return (int)bits; }
#else
__device__ __forceinline__ Total total_of_bits(u32 bits) { return __uint_as_float(bits); }
#endif

#if SPLITS > 1
__device__ __forceinline__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ u32 read_of(u32 place, u32 rank) {
  u32 bits;
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u32 %0, [there];}"
      : "=r"(bits)
      : "r"(place), "r"(rank)
      : "memory");
  return bits;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stream_linear(const char* __restrict__ w, const char* __restrict__ x, Out* y,
                  const Out* residual, const Out* __restrict__ bias,
                  const char* __restrict__ gain, const float* x_scale,
                  const void* __restrict__ w_scale, int rows, int width, int bytes, int groups,
                  int groups_each, u32 w_stride, u32 x_stride, u64 residual_stride, u64 y_stride,
                  int inputs, float eps) {
  extern __shared__ __align__(16) char room[];
  Total* all_sums = (Total*)(room + WARPS * STAGES * LOADS * 512);  // [BUFFERS][WARPS][ROWS][WIDE]
  float* squares_of = (float*)(all_sums + BUFFERS * WARPS * ROWS * WIDE);  // [WARPS][COLUMNS * 8]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int cta = blockIdx.x / SPLITS, rank = blockIdx.x % SPLITS;

  const int steps = bytes / STEP_BYTES, sharers = WARPS * SPLITS, sharer = rank * WARPS + warp;
  const int begin = steps * sharer / sharers, mine = steps * (sharer + 1) / sharers - begin;
  const int first_group = cta * groups_each;
  const int last_group = first_group + groups_each < groups ? first_group + groups_each : groups;
  const int total = (last_group - first_group) * mine;

  const u32 ring = shared_place(room) + warp * STAGES * LOADS * 512;
  const int own_row = lane / 8, vector = lane % 8;
  const char* w_lane = w + (u64)begin * STEP_BYTES + vector * 16;
  const u64 x_begin = (u64)begin * X_STEP_BYTES;

  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  auto send_weights = [&](int slot, int group, int step) {
    const u32 to = ring + slot * LOADS * 512;
    const char* from = w_lane + (u64)step * STEP_BYTES;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
      const int row = i + own_row;
      const char* at = from + (u64)(u32)weight_row(group, i / 16, row % 16, width) * w_stride;
      copy_ahead(to + place_of(row, vector), at, policy);
    }
  };
  auto send_rows = [&](int slot, int step) {
    const u32 to = ring + (slot * LOADS + W_LOADS) * 512;
#pragma unroll
    for (int i = 0; i < X_LINES; i += 4) {
      const int line = i + own_row, row = line / PIECES, piece = line % PIECES * 8 + vector;
      const bool known = row < rows;
      if (line >= X_LINES) continue;
      const char* at = x + x_begin + (u64)(u32)(known ? row : 0) * x_stride;
      copy_or_zero(to + x_place(row, piece), at + (u64)step * X_STEP_BYTES + piece * 16, known);
    }
  };
  auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };

  int ahead_step = 0, ahead_group = first_group;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i < total) {
      send_weights(i, ahead_group, ahead_step);
      if (++ahead_step == mine) {
        ahead_step = 0;
        ++ahead_group;
      }
    }
  }

#if NORM
  Words next_gains[2][PIECES];
  auto fetch_gains = [&](int step) {
#pragma unroll
    for (int p = 0; p < 2 * PIECES; ++p) {
      const u64 at = (u64)step * X_STEP_BYTES + p / PIECES * 64 * PIECES + p % PIECES * 16;
      next_gains[p / PIECES][p % PIECES] = read_constant(gain + x_begin + t * 16 * PIECES + at);
    }
  };
  if (total > 0) fetch_gains(0);
#endif

#if KEPT
  // For each step of each warp: of the rows of x there are two planes of codes, then their units.
  const int most = (steps + sharers - 1) / sharers, planes = 2 * rows * 64;
  char* const kept = (char*)(squares_of + WARPS * COLUMNS * 8);
  float* const units = (float*)(kept + WARPS * most * planes) + warp * most * rows;
  auto codes_at = [&](int step, int row, int h) {
    return shared_place(kept) + (warp * most + step) * planes + h * rows * 64 + row * 64 + t * 16;
  };
#endif

#if DEPENDENT
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // The first of these copies has all the weights sent so far.
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i < (KEPT ? mine : total)) send_rows(i, i % mine);
    commit();
  }
  int slot = 0;
  for (int group = first_group; group < last_group; ++group) {
    const bool is_first = group == first_group;
    const int buffer = BUFFERS == 2 ? (group - first_group) % 2 : 0;
    Total* const sums = all_sums + buffer * WARPS * ROWS * WIDE;
    Total total_of[TILES][COLUMNS][4] = {};
#if NORM
    float squares[COLUMNS] = {};
#endif
    for (int step = 0; step < mine; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
      const u32 from = ring + slot * LOADS * 512;
      Words taken[COLUMNS][2];
#if ROUNDS
      float unit_of[COLUMNS];
#endif
      auto take_rows = [&] {
        Words now[COLUMNS][2][PIECES];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
          for (int p = 0; p < 2 * PIECES; ++p) {
            const int piece = (p / PIECES * 4 + t) * PIECES + p % PIECES;
            const u32 at = from + W_LOADS * 512 + x_place((c * 8 + g) % X_ROWS, piece);
            now[c][p / PIECES][p % PIECES] = read_shared(at);
#if NORM
            if (is_first) squares[c] += squares_of_all(now[c][p / PIECES][p % PIECES]);
            times_all(now[c][p / PIECES][p % PIECES], next_gains[p / PIECES][p % PIECES]);
#endif
          }
        }
#if NORM
        fetch_gains(step + 1 < mine ? step + 1 : 0);
#endif
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#if ROUNDS
          u32 pair = larger(larger(largest_of(now[c][0][0]), largest_of(now[c][0][1])),
                            larger(largest_of(now[c][1][0]), largest_of(now[c][1][1])));
          pair = larger(pair, __shfl_xor_sync(0xffffffffu, pair, 1));
          pair = larger(pair, __shfl_xor_sync(0xffffffffu, pair, 2));
          const float most_of = low<0>(larger(pair, pair >> 16));
          const float factor = most_of > 1e-30f ? __fdividef(LARGEST, most_of) : 0.0f;
          unit_of[c] = most_of * (1.0f / LARGEST);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const Words &a = now[c][h][0], &b = now[c][h][1];
            taken[c][h] = Words{rounded(a.x, a.y, factor), rounded(a.z, a.w, factor),
                                rounded(b.x, b.y, factor), rounded(b.z, b.w, factor)};
          }
#else
          taken[c][0] = now[c][0][0];
          taken[c][1] = now[c][1][0];
#endif
        }
      };
#if KEPT
      if (is_first) {
        take_rows();
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int row = c * 8 + g;
          if (row >= rows) continue;
          write_shared(codes_at(step, row, 0), taken[c][0]);
          write_shared(codes_at(step, row, 1), taken[c][1]);
          if (t == 0) units[step * rows + row] = unit_of[c];
        }
      } else {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int row = c * 8 + g;
          const bool known = row < rows;
          taken[c][0] = known ? read_shared(codes_at(step, row, 0)) : Words{};
          taken[c][1] = known ? read_shared(codes_at(step, row, 1)) : Words{};
          unit_of[c] = known ? units[step * rows + row] : 0.0f;
        }
      }
#else
      take_rows();
#endif
#if ROUNDS
      Sum now_of[TILES][COLUMNS][4];
#pragma unroll
      for (int i = 0; i < TILES * COLUMNS * 4; ++i)
        now_of[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = NO_SUM;
#else
      auto& now_of = total_of;
#endif
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Words upper = read_shared(from + place_of(tile * 16 + g, h * 4 + t));
          const Words lower = read_shared(from + place_of(tile * 16 + 8 + g, h * 4 + t));
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            const Words& part = taken[c][h];
            multiply(now_of[tile][c], upper.x, lower.x, upper.y, lower.y, part.x, part.y);
            multiply(now_of[tile][c], upper.z, lower.z, upper.w, lower.w, part.z, part.w);
          }
        }
      }
#if ROUNDS
      // The columns of a lane's sums are rows 2 t and 2 t + 1 of x; their units are in lanes 8 t.
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const float even = __shfl_sync(0xffffffffu, unit_of[c], 8 * t);
        const float odd = __shfl_sync(0xffffffffu, unit_of[c], 8 * t + 4);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          total_of[tile][c][0] += number_of(now_of[tile][c][0]) * even;
          total_of[tile][c][1] += number_of(now_of[tile][c][1]) * odd;
          total_of[tile][c][2] += number_of(now_of[tile][c][2]) * even;
          total_of[tile][c][3] += number_of(now_of[tile][c][3]) * odd;
        }
      }
#endif
      __syncwarp();  // all have read what is written over now
      if (ahead_group < last_group) {
        send_weights(slot, ahead_group, ahead_step);
        if (!KEPT || ahead_group == first_group) send_rows(slot, ahead_step);
        if (++ahead_step == mine) {
          ahead_step = 0;
          ++ahead_group;
        }
      }
      commit();
      if (++slot == STAGES) slot = 0;
    }

    Total* own = sums + warp * ROWS * WIDE;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        Total* at = own + (tile * 16 + g) * WIDE + c * 8 + t * 2;
        at[0] = total_of[tile][c][0];
        at[1] = total_of[tile][c][1];
        at[8 * WIDE] = total_of[tile][c][2];
        at[8 * WIDE + 1] = total_of[tile][c][3];
      }
    }
#if NORM
    if (is_first) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        float both = squares[c] + __shfl_xor_sync(0xffffffffu, squares[c], 1);
        both += __shfl_xor_sync(0xffffffffu, both, 2);
        if (t == 0) squares_of[warp * COLUMNS * 8 + c * 8 + g] = both;
      }
    }
#endif
    __syncthreads();

#if SPLITS > 1
    // Of its own warps each CTA makes one sum, then each finishes some outputs of all.
    for (int e = threadIdx.x; e < ROWS * COLUMNS * 8; e += THREADS) {
      Total* at = sums + (e / (COLUMNS * 8)) * WIDE + e % (COLUMNS * 8);
      Total sum = at[0];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sum += at[i * ROWS * WIDE];
      at[0] = sum;
    }
#if NORM
    if (is_first && threadIdx.x < COLUMNS * 8) {
      float sum = squares_of[threadIdx.x];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sum += squares_of[i * COLUMNS * 8 + threadIdx.x];
      squares_of[threadIdx.x] = sum;
    }
#endif
    cluster_meets();
#endif

    auto sum_at = [&](int row, int m) {
      Total* at = sums + row * WIDE + m;
      Total sum = 0;
#if SPLITS > 1
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) sum += total_of_bits(read_of(shared_place(at), i));
#else
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += at[i * ROWS * WIDE];
#endif
      return (float)sum;
    };

    for (int e = rank * THREADS + threadIdx.x; e < OUTPUTS * rows; e += SPLITS * THREADS) {
      const int m = e / OUTPUTS, o = e % OUTPUTS;
      const int output = group * OUTPUTS + o;
      if (output >= width) continue;
#if GATED
      const int row = o / 16 * 32 + o % 16;
      float value = sum_at(row, m), up = sum_at(row + 16, m);
#else
      float value = sum_at(o, m);
#endif
#if NORM
      float squares_m = 0.0f;
#if SPLITS > 1
#pragma unroll
      for (int i = 0; i < SPLITS; ++i)
        squares_m += __uint_as_float(read_of(shared_place(squares_of + m), i));
#else
#pragma unroll
      for (int i = 0; i < WARPS; ++i) squares_m += squares_of[i * COLUMNS * 8 + m];
#endif
      const float factor = rsqrtf(squares_m / (float)inputs + eps);
      value *= factor;
#if GATED
      up *= factor;
#endif
#endif
#if SCALED
      // Rounded one by one, as everywhere: a row of int8 has the same bits by any kernel.
#if ROUNDS
      const float scale = 1.0f;
#else
      const float scale = __ldcg(x_scale + m);
#endif
      value = __fmul_rn(value, scale * scale_of(w_scale, output));
#if GATED
      up = __fmul_rn(up, scale * scale_of(w_scale, output + width));
#endif
#endif
#if BIAS
      value += load_number(bias + output);
#if GATED
      up += load_number(bias + output + width);
#endif
#endif
#if GATED
      value = value / (1.0f + __expf(-value)) * up;
#endif
#if RESIDUAL
      value += load_number(residual + (u64)m * residual_stride + output);
#endif
      store_number(y + (u64)m * y_stride + output, value);
    }
#if SPLITS > 1
    cluster_meets();
#elif BUFFERS == 1
    __syncthreads();
#endif
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}
