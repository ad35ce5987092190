// y = epilogue(norm(x) @ W.T) for few rows of x and W of 4 bits: streams W once, as fast as memory
// gives it.
//
// A CTA owns groups of TILES * 16 rows of W over all of K (or, in a cluster of SPLITS, a share of
// K); its warps share K. Each warp has a ring of its own, of SLOTS slots, which the copy engine
// fills with the next records of the warp (DEEP of each of TILES sixteens of rows). It is filled
// before the wait for the kernel before, since weights depend on no kernel, and runs on from group
// to group; a warp waits for its own copies and for nothing else, until the sums of `held` groups
// are there. x is in shared memory as a whole: each warp brings the columns that it multiplies, once.
// Codes are multiplied as the whole numbers that they are; a group's sums are then scaled in
// float32, so that a weight is never rounded. In bfloat16 they are multiplied as 128 + code, which
// is what bits make of them, and sums begin with what that is too much: sums of x, taken with the
// first group, times 128 + the zero point. (In float16, where it is 1,024, that would cost digits: there the zero
// point is taken from each code.) Sums of the warps, then of the cluster, are added in their order:
// same input, same bits.
//
// Compiled with: what int4_record.cu says; COLUMNS tiles of 8 rows of x, of which the first KEPT
// are wanted; TILES; DEEP, which divides the records along K; SLOTS; SPLITS; WARPS; RESIDENT programs that a multiprocessor should find room
// for; NORM, GATED, RESIDUAL, BIAS, DEPENDENT (programmatic launch) 0 or 1.
// Letters as in small_linear: M rows of x, K inputs, N rows of W, O outputs.

#include "int4_record.cu"

#define THREADS (WARPS * 32)
#define UNIT_BYTES (DEEP * RECORD)
#define SLOT_BYTES (TILES * UNIT_BYTES)
#define ROWS (TILES * 16)  // of W in a group
#define WIDE (KEPT > 1 ? KEPT + 1 : 1)
#define X_BYTES 256  // of a row of x, beside a record
#define X_UNIT_BYTES (DEEP * X_BYTES)
#define ONES 0x3f803f80u  // two of bfloat16
#define CHAIN (GROUP < 64 ? 2 : 4)  // products that are added before they are scaled
#define CHAINS (8 / CHAIN)          // of a record
#define RAISED (ELEMENT == 0)       // codes are multiplied with what they are raised by
#define X_SUMS (RAISED * CHAINS * COLUMNS * 8)  // beside a record
#if GATED
#define OUTPUTS (ROWS / 2)
#else
#define OUTPUTS ROWS
#endif

#ifdef __CUDACC__  // a test runs the rest on a CPU, with its own versions of these

typedef u32 Place;  // in shared memory

__device__ __forceinline__ Place place_of(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 bytes, past the L1 cache, which may hold what was there before the kernel before this one.
__device__ __forceinline__ void copy_vector(Place to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void wait_for_vectors() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void make_barrier(Place at) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
}

__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect(Place barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait_for(Place barrier, u32 parity) {
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

// What is read once leaves the L2 cache first.
__device__ __forceinline__ u64 once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_bytes(Place to, const char* from, u32 bytes, Place barrier,
                                           u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Four 8 x 8 pieces of rows whose places the lanes tell.
__device__ __forceinline__ void read_pieces(u32 (&to)[4], Place at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
#if ELEMENT == 0
#define SHAPE "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define SHAPE "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
  asm(SHAPE "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 load_bits(const u16* at) {
  u16 bits;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(at) : "memory");
  return bits;
}

__device__ __forceinline__ float exponential(float x) { return __expf(x); }

#endif

__device__ __forceinline__ float load_number(const u16* at) { return first_of(load_bits(at)); }

__device__ __forceinline__ void store_number(u16* at, float value) {
  *at = (u16)pair_of(value, 0.0f);
}

#if NORM
__device__ __forceinline__ float squares_of(u32 pair) {
  return first_of(pair) * first_of(pair) + second_of(pair) * second_of(pair);
}
#endif

#if SPLITS > 1
__device__ __forceinline__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ float read_of(const float* at, u32 rank) {
  float value;
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
      : "=f"(value)
      : "r"(place_of(at)), "r"(rank)
      : "memory");
  return value;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    int4_stream(const char* __restrict__ w, const char* __restrict__ x, u16* y,
                const u16* residual, const u16* __restrict__ bias, const char* __restrict__ gain,
                int rows, int tiles, int records, int groups, int groups_each, int held, int x_pitch,
                u64 x_stride, u64 residual_stride, u64 y_stride, float eps) {
  extern __shared__ __align__(128) char room[];
  // The ring, its barriers, sums of `held` groups (twice, in turn, if there are more), their totals, squares,
  // gains, x, sums of x.
  const int turns = held < groups_each ? 2 : 1;
  u64* barriers = (u64*)(room + WARPS * SLOTS * SLOT_BYTES);
  float* sums = (float*)(barriers + WARPS * SLOTS);  // [turns][held][WARPS][ROWS][WIDE]
  float* totals = sums + turns * held * WARPS * ROWS * WIDE;     // [turns][held][ROWS][WIDE]
  float* squares = totals + (SPLITS > 1 ? turns * held * ROWS * WIDE : 0);  // [WARPS][KEPT]
  // x has to begin at a multiple of 16.
  char* gains = room + ((u32)((char*)(squares + WARPS * KEPT) - room) + 15) / 16 * 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int cta = blockIdx.x / SPLITS, rank = blockIdx.x % SPLITS;

  const int sharers = WARPS * SPLITS, sharer = rank * WARPS + warp;
  const int units = records / DEEP;  // of K
  const int begin = units * sharer / sharers;
  const int mine = units * (sharer + 1) / sharers - begin;
  const int inside = begin - units * (rank * WARPS) / sharers;  // of what this CTA has of K
  char* rows_of_x = gains + (NORM ? x_pitch : 0);
#if RAISED
  float* own_sums = (float*)(rows_of_x + rows * x_pitch) + inside * DEEP * X_SUMS;
#endif
  const int first_group = cta * groups_each;
  const int last_group = first_group + groups_each < groups ? first_group + groups_each : groups;
  const int total = (last_group - first_group) * mine;

  char* ring = room + warp * SLOTS * SLOT_BYTES;
  const u64 policy = once();

  // Of which 16 rows of W a tile of a group is; past the end the last ones again.
  auto rows_of = [&](int group, int tile) {
#if GATED
    const int pair = group * (TILES / 2) + tile / 2;
    return (pair < tiles ? pair : tiles - 1) + (tile & 1) * tiles;
#else
    const int one = group * TILES + tile;
    return one < tiles ? one : tiles - 1;
#endif
  };
  int ahead_group = first_group, ahead_step = 0, sent = 0;
  const Place full = place_of(barriers + warp * SLOTS);
  // By one lane.
  auto send = [&](int slot) {
    const Place barrier = full + slot * 8, to = place_of(ring + slot * SLOT_BYTES);
    expect(barrier, SLOT_BYTES);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const u64 unit = (u64)rows_of(ahead_group, tile) * units + begin + ahead_step;
      copy_bytes(to + tile * UNIT_BYTES, w + unit * UNIT_BYTES, UNIT_BYTES, barrier, policy);
    }
    ++sent;
    if (++ahead_step == mine) {
      ahead_step = 0;
      ++ahead_group;
    }
  };

  if (lane == 0) {
    for (int i = 0; i < SLOTS; ++i) make_barrier(full + i * 8);
    show_barriers();
    for (int i = 0; i < SLOTS && i < total; ++i) send(i);
  }
  __syncwarp();

  const int vectors = mine * (X_UNIT_BYTES / 16);  // of 16 bytes, of a row of x or of the gains
#if NORM
  for (int v = lane; v < vectors; v += 32)
    copy_vector(place_of(gains + inside * X_UNIT_BYTES + v * 16),
                gain + begin * X_UNIT_BYTES + v * 16);
#endif

#if DEPENDENT
  wait_for_kernel_before();
  let_next_kernel_begin();
#endif

  char* own_x = rows_of_x + inside * X_UNIT_BYTES;
  for (int m = 0; m < rows; ++m) {
    const char* from = x + m * x_stride + begin * X_UNIT_BYTES;
    for (int v = lane; v < vectors; v += 32)
      copy_vector(place_of(own_x + m * x_pitch + v * 16), from + v * 16);
  }
  wait_for_vectors();
  __syncwarp();

#if NORM
  // x becomes x times its gain; what it is divided by is made of the squares of all warps.
  float own_squares[KEPT] = {};
  for (int v = lane; v < vectors; v += 32) {
    const uint4 by = *(const uint4*)(gains + inside * X_UNIT_BYTES + v * 16);
#pragma unroll
    for (int m = 0; m < KEPT; ++m) {
      if (m >= rows) break;
      uint4* at = (uint4*)(own_x + m * x_pitch + v * 16);
      const uint4 is = *at;
      own_squares[m] += squares_of(is.x) + squares_of(is.y) + squares_of(is.z) + squares_of(is.w);
      *at = make_uint4(times(is.x, by.x), times(is.y, by.y), times(is.z, by.z), times(is.w, by.w));
    }
  }
#pragma unroll
  for (int m = 0; m < KEPT; ++m) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
      own_squares[m] += __shfl_xor_sync(0xffffffffu, own_squares[m], i);
    if (lane == 0) squares[warp * KEPT + m] = own_squares[m];
  }
  __syncwarp();
#endif

  // Where this lane points for the pieces of x: row lane % 8, columns 8 * (lane / 8) and on.
  Place x_place[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const int m = c * 8 + lane % 8;
    x_place[c] = place_of(own_x + (m < rows ? m : 0) * x_pitch + lane / 8 * 16);
  }

  const u32 opens = opens_of_launch();
  int slot = 0, turn = 0, here = 0;
  u32 parity = 0;
  int opening = first_group;  // of the groups whose sums are here
  for (int group = first_group; group < last_group; ++group) {
    float total_of[TILES][COLUMNS][4] = {};
    for (int step = 0; step < mine; ++step) {
#pragma unroll
      for (int deep = 0; deep < DEEP; ++deep) {
        const int record_of_x = step * DEEP + deep;
        u32 taken[COLUMNS][4][4];  // columns 32 i and on, as right operands of two products each
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            read_pieces(taken[c][i], x_place[c] + record_of_x * X_BYTES + i * 64);
        }
#if RAISED
        // What sums begin with (with zero points: over what is theirs). All rows of a product with
        // ones are sums of x: each lane has those of its columns, 2 t and 2 t + 1.
        float begins[COLUMNS][CHAINS][2];
        float* kept = own_sums + record_of_x * X_SUMS + t * 2;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
          for (int chain = 0; chain < CHAINS; ++chain) {
            float* at = kept + (chain * COLUMNS + c) * 8;
            float2 both;
            if (group == first_group) {
              float sum[4] = {};
#pragma unroll
              for (int i = chain * CHAIN; i < (chain + 1) * CHAIN; ++i) {
                const u32(&x_pair)[4] = taken[c][i / 2];
                multiply(sum, ONES, ONES, ONES, ONES, x_pair[i % 2 * 2], x_pair[i % 2 * 2 + 1]);
              }
              const float by = ZERO ? -1.0f : -(OPENS_AT + 8.0f);
              both.x = sum[0] * by;
              both.y = sum[1] * by;
              if (g == 0) *(float2*)at = both;
            } else {
              both = *(const float2*)at;
            }
            begins[c][chain][0] = both.x;
            begins[c][chain][1] = both.y;
          }
        }
#endif
        if (deep == 0) wait_for(full + slot * 8, parity);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const char* record = ring + slot * SLOT_BYTES + (tile * DEEP + deep) * RECORD;
          const uint4 upper = *(const uint4*)(record + lane * 16);
          const uint4 lower = *(const uint4*)(record + HALF_BYTES + lane * 16);
          const u32 words[2][4] = {{upper.x, upper.y, upper.z, upper.w},
                                   {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
          for (int chain = 0; chain < CHAINS; ++chain) {
            const int of = chain * CHAIN * 16 / GROUP;
            float now_of[COLUMNS][4];
#if RAISED
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
#if ZERO
              const float upper_raise = OPENS_AT + (float)zero_of(record, of, g);
              const float lower_raise = OPENS_AT + (float)zero_of(record, of, 8 + g);
#else
              const float upper_raise = 1.0f, lower_raise = 1.0f;
#endif
              now_of[c][0] = begins[c][chain][0] * upper_raise;
              now_of[c][1] = begins[c][chain][1] * upper_raise;
              now_of[c][2] = begins[c][chain][0] * lower_raise;
              now_of[c][3] = begins[c][chain][1] * lower_raise;
            }
#define NUMBERS(word, shift, zero) raised((word) >> (shift), opens)
#else
            const u32 upper_zero = raised_zero_of(record, of, g);
            const u32 lower_zero = raised_zero_of(record, of, 8 + g);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
              now_of[c][0] = now_of[c][1] = now_of[c][2] = now_of[c][3] = 0.0f;
#define NUMBERS(word, shift, zero) minus(raised((word) >> (shift), opens), zero)
#endif
#pragma unroll
            for (int i = chain * CHAIN; i < (chain + 1) * CHAIN; ++i) {
              const int shift = i % 2 * 8;
              const u32 a0 = NUMBERS(words[0][i / 2], shift, upper_zero);
              const u32 a1 = NUMBERS(words[1][i / 2], shift, lower_zero);
              const u32 a2 = NUMBERS(words[0][i / 2], shift + 4, upper_zero);
              const u32 a3 = NUMBERS(words[1][i / 2], shift + 4, lower_zero);
#pragma unroll
              for (int c = 0; c < COLUMNS; ++c) {
                const u32(&x_pair)[4] = taken[c][i / 2];
                multiply(now_of[c], a0, a1, a2, a3, x_pair[i % 2 * 2], x_pair[i % 2 * 2 + 1]);
              }
            }
            const float upper_scale = scale_of(record, of, g);
            const float lower_scale = scale_of(record, of, 8 + g);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
              total_of[tile][c][0] += now_of[c][0] * upper_scale;
              total_of[tile][c][1] += now_of[c][1] * upper_scale;
              total_of[tile][c][2] += now_of[c][2] * lower_scale;
              total_of[tile][c][3] += now_of[c][3] * lower_scale;
            }
          }
        }
      }
      __syncwarp();  // all have read what is written over now
      if (lane == 0 && sent < total) send(slot);
      if (++slot == SLOTS) {
        slot = 0;
        parity ^= 1;
      }
    }

    float* own = sums + ((turn * held + here) * WARPS + warp) * ROWS * WIDE;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = c * 8 + t * 2 + i % 2;
          if (m < KEPT) own[(tile * 16 + i / 2 * 8 + g) * WIDE + m] = total_of[tile][c][i];
        }
      }
    }
    if (++here < held && group + 1 < last_group) continue;

    const int width = tiles * 16, count = here * OUTPUTS * rows;
    auto output_of = [&](int e) { return (opening + e / OUTPUTS / rows) * OUTPUTS + e % OUTPUTS; };
    auto added_to = [&](int e) {
      const int output = output_of(e);
      return RESIDUAL && output < width
                 ? load_number(residual + e / OUTPUTS % rows * residual_stride + output)
                 : 0.0f;
    };
    int e = rank * THREADS + threadIdx.x;
    float added = e < count ? added_to(e) : 0.0f;  // on its way while others are waited for
    __syncthreads();
    const float* of_warps = sums + turn * held * WARPS * ROWS * WIDE;
#if SPLITS > 1
    // Of its own warps each CTA makes one sum, then each finishes some outputs of all.
    float* total_here = totals + turn * held * ROWS * WIDE;
    for (int i = threadIdx.x; i < here * ROWS * WIDE; i += THREADS) {
      const float* at = of_warps + i / (ROWS * WIDE) * (WARPS * ROWS * WIDE) + i % (ROWS * WIDE);
      float sum = at[0];
#pragma unroll
      for (int n = 1; n < WARPS; ++n) sum += at[n * ROWS * WIDE];
      total_here[i] = sum;
    }
#if NORM
    if (opening == first_group && threadIdx.x < KEPT) {
      float sum = squares[threadIdx.x];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sum += squares[i * KEPT + threadIdx.x];
      squares[threadIdx.x] = sum;
    }
#endif
    cluster_meets();
#endif

    auto sum_at = [&](int of_group, int row, int m) {
      float sum = 0.0f;
#if SPLITS > 1
      const float* at = total_here + (of_group * ROWS + row) * WIDE + m;
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) sum += read_of(at, i);
#else
      const float* at = of_warps + (of_group * WARPS * ROWS + row) * WIDE + m;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += at[i * ROWS * WIDE];
#endif
      return sum;
    };

    for (; e < count; e += SPLITS * THREADS) {
      const int of_group = e / OUTPUTS / rows, m = e / OUTPUTS % rows, o = e % OUTPUTS;
      const int output = output_of(e);
      if (output < width) {
#if GATED
        const int row = o / 16 * 32 + o % 16;
        float value = sum_at(of_group, row, m), up = sum_at(of_group, row + 16, m);
#else
        float value = sum_at(of_group, o, m);
#endif
#if NORM
        float squares_m = 0.0f;
#if SPLITS > 1
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) squares_m += read_of(squares + m, i);
#else
#pragma unroll
        for (int i = 0; i < WARPS; ++i) squares_m += squares[i * KEPT + m];
#endif
        const float factor = rsqrtf(squares_m / (float)(records * 128) + eps);
        value *= factor;
#if GATED
        up *= factor;
#endif
#endif
#if BIAS
        value += load_number(bias + output);
#if GATED
        up += load_number(bias + output + width);
#endif
#endif
#if GATED
        value = value / (1.0f + exponential(-value)) * up;
#endif
        store_number(y + m * y_stride + output, value + added);
      }
      if (e + SPLITS * THREADS < count) added = added_to(e + SPLITS * THREADS);
    }
    opening = group + 1;
    here = 0;
    turn = turns - 1 - turn;
  }
#if SPLITS > 1
  cluster_meets();  // nothing is read of one that has ended
#endif
}
