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
// Compiled with: ELEMENT 0 bfloat16, 1 float16, 2 e4m3 (x too, with a scale of each row of x and W),
// 3 W of e4m3 with a scale of each row, x of bfloat16, which is rounded to e4m3 here, with a scale for
// each 128 numbers; COLUMNS tiles of 8 rows of x; TILES; STAGES of the ring; SPLITS; WARPS; NORM, GATED, RESIDUAL,
// BIAS, DEPENDENT (programmatic launch) 0 or 1. OUT: element of y, residual, bias: 0 or 1.
// Letters as in small_linear: M rows of x, K inputs, N rows of W, O outputs.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define THREADS (WARPS * 32)
#define STEP_BYTES 128
#define W_LOADS (TILES * 4)  // 16 bytes each, of a lane and step
#define ROWS (TILES * 16)  // of W in a group
#define WIDE (COLUMNS * 8 + 1)
#define ROUNDS (ELEMENT == 3)
#define X_KIND (ROUNDS ? 0 : ELEMENT)
#define PIECES (ROUNDS ? 2 : 1)  // 16 bytes of x beside 16 bytes of W
#define X_STEP_BYTES (STEP_BYTES * PIECES)
#define LOADS (W_LOADS + COLUMNS * 2 * PIECES)
#if GATED
#define OUTPUTS (ROWS / 2)
#else
#define OUTPUTS ROWS
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

__device__ __forceinline__ float load_number(const u16* at) {
  u16 bits;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(at) : "memory");
  return low<OUT>((u32)bits);
}

__device__ __forceinline__ void store_number(u16* at, float value) {
  *at = (u16)(pack<OUT>(value, 0.0f) & 0xffff);
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
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
}

#if ROUNDS
#define LARGEST 448.0f  // of e4m3

__device__ __forceinline__ float largest_of(const Words& x) {
  float largest = fmaxf(fabsf(low<0>(x.x)), fabsf(high<0>(x.x)));
  largest = fmaxf(largest, fmaxf(fabsf(low<0>(x.y)), fabsf(high<0>(x.y))));
  largest = fmaxf(largest, fmaxf(fabsf(low<0>(x.z)), fabsf(high<0>(x.z))));
  return fmaxf(largest, fmaxf(fabsf(low<0>(x.w)), fabsf(high<0>(x.w))));
}

// Four numbers times `factor`, as e4m3.
__device__ __forceinline__ u32 rounded(u32 first, u32 second, float factor) {
  u16 lower, upper;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(lower)
      : "f"(high<0>(first) * factor), "f"(low<0>(first) * factor));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(upper)
      : "f"(high<0>(second) * factor), "f"(low<0>(second) * factor));
  return (u32)lower | (u32)upper << 16;
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

#if SPLITS > 1
__device__ __forceinline__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ float read_of(u32 place, u32 rank) {
  float value;
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
      : "=f"(value)
      : "r"(place), "r"(rank)
      : "memory");
  return value;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stream_linear(const char* __restrict__ w, const char* __restrict__ x, u16* y,
                  const u16* residual, const u16* __restrict__ bias,
                  const char* __restrict__ gain, const float* __restrict__ x_scale,
                  const float* __restrict__ w_scale, int rows, int width, int bytes, int groups,
                  int groups_each, u64 w_stride, u64 x_stride, u64 residual_stride, u64 y_stride,
                  int inputs, float eps) {
  extern __shared__ __align__(16) char room[];
  float* sums = (float*)(room + WARPS * STAGES * LOADS * 512);  // [WARPS][ROWS][WIDE]
  float* squares_of = sums + WARPS * ROWS * WIDE;               // [WARPS][COLUMNS * 8]
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
      const char* at = from + (u64)weight_row(group, i / 16, row % 16, width) * w_stride;
      copy_ahead(to + place_of(row, vector), at, policy);
    }
  };
  auto send_rows = [&](int slot, int step) {
    const u32 to = ring + (slot * LOADS + W_LOADS) * 512;
#pragma unroll
    for (int i = 0; i < COLUMNS * 8 * PIECES; i += 4) {
      const int line = i + own_row, row = line / PIECES, piece = line % PIECES * 8 + vector;
      const bool known = row < rows;
      const char* at = x + x_begin + (u64)(known ? row : 0) * x_stride;
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

#if DEPENDENT
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // The first of these groups has all the weights sent so far.
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i < total) send_rows(i, i % mine);
    commit();
  }
  int slot = 0;
  for (int group = first_group; group < last_group; ++group) {
    float total_of[TILES][COLUMNS][4] = {};
#if NORM
    float squares[COLUMNS] = {};
#endif
    for (int step = 0; step < mine; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
      const u32 from = ring + slot * LOADS * 512;
      Words now[COLUMNS][2][PIECES];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int p = 0; p < 2 * PIECES; ++p) {
          const int piece = (p / PIECES * 4 + t) * PIECES + p % PIECES;
          const u32 at = from + W_LOADS * 512 + x_place(c * 8 + g, piece);
          now[c][p / PIECES][p % PIECES] = read_shared(at);
#if NORM
          if (group == first_group) squares[c] += squares_of_all(now[c][p / PIECES][p % PIECES]);
          times_all(now[c][p / PIECES][p % PIECES], next_gains[p / PIECES][p % PIECES]);
#endif
        }
      }
#if NORM
      fetch_gains(step + 1 < mine ? step + 1 : 0);
#endif
#if ROUNDS
      float now_of[TILES][COLUMNS][4] = {};
      float unit_of[COLUMNS];
      Words taken[COLUMNS][2];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        float most = fmaxf(fmaxf(largest_of(now[c][0][0]), largest_of(now[c][0][1])),
                           fmaxf(largest_of(now[c][1][0]), largest_of(now[c][1][1])));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        unit_of[c] = most * (1.0f / LARGEST);
        const float factor = most > 1e-30f ? __fdividef(LARGEST, most) : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Words &a = now[c][h][0], &b = now[c][h][1];
          taken[c][h] = Words{rounded(a.x, a.y, factor), rounded(a.z, a.w, factor),
                                   rounded(b.x, b.y, factor), rounded(b.z, b.w, factor)};
        }
      }
#else
      auto& now_of = total_of;
      Words taken[COLUMNS][2];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        taken[c][0] = now[c][0][0];
        taken[c][1] = now[c][1][0];
      }
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
          total_of[tile][c][0] += now_of[tile][c][0] * even;
          total_of[tile][c][1] += now_of[tile][c][1] * odd;
          total_of[tile][c][2] += now_of[tile][c][2] * even;
          total_of[tile][c][3] += now_of[tile][c][3] * odd;
        }
      }
#endif
      __syncwarp();  // all have read what is written over now
      if (ahead_group < last_group) {
        send_weights(slot, ahead_group, ahead_step);
        send_rows(slot, ahead_step);
        if (++ahead_step == mine) {
          ahead_step = 0;
          ++ahead_group;
        }
      }
      commit();
      if (++slot == STAGES) slot = 0;
    }

    float* own = sums + warp * ROWS * WIDE;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        float* at = own + (tile * 16 + g) * WIDE + c * 8 + t * 2;
        at[0] = total_of[tile][c][0];
        at[1] = total_of[tile][c][1];
        at[8 * WIDE] = total_of[tile][c][2];
        at[8 * WIDE + 1] = total_of[tile][c][3];
      }
    }
#if NORM
    if (group == first_group) {
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
      float* at = sums + (e / (COLUMNS * 8)) * WIDE + e % (COLUMNS * 8);
      float sum = at[0];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sum += at[i * ROWS * WIDE];
      at[0] = sum;
    }
#if NORM
    if (group == first_group && threadIdx.x < COLUMNS * 8) {
      float sum = squares_of[threadIdx.x];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sum += squares_of[i * COLUMNS * 8 + threadIdx.x];
      squares_of[threadIdx.x] = sum;
    }
#endif
    cluster_meets();
#endif

    auto sum_at = [&](int row, int m) {
      float* at = sums + row * WIDE + m;
      float sum = 0.0f;
#if SPLITS > 1
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) sum += read_of(shared_place(at), i);
#else
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += at[i * ROWS * WIDE];
#endif
      return sum;
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
      for (int i = 0; i < SPLITS; ++i) squares_m += read_of(shared_place(squares_of + m), i);
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
#if ELEMENT >= 2
#if ROUNDS
      const float scale = 1.0f;
#else
      const float scale = x_scale[m];
#endif
      value *= scale * w_scale[output];
#if GATED
      up *= scale * w_scale[output + width];
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
#else
    __syncthreads();
#endif
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}
