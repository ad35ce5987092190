// Attention of one new token of each request over a paged cache, as fast as the cache can be read.
//
// Work is cut into steps of 16 keys of a request, for all heads at once. A CTA takes a range of
// steps that follow one another (`records`, dealt out by a small kernel before), a warp one KV head
// of it; so a CTA reads whole tokens. A warp shares nothing with others: its lanes copy rows of a
// head, 16 bytes each, into a ring of the warp, some steps ahead and across the ends of requests,
// and wait for nothing but the copies. (Copies of 64 bytes of a row, which let each lane fetch what
// it multiplies, were slower by a quarter: the L2 cache was asked for each line twice.) In the ring
// the places within a row are permuted so that no two lanes that read together meet in a bank.
// Products: S^T = K Q^T and O^T = V^T P^T, so the query heads of a KV head are the 8 columns of
// mma.m16n8k16. Lane (g, t) = (lane / 4, lane % 4). A sum over head dimensions may be taken in any
// order, so a lane's piece of K is 16 bytes that lie together: keys g and 8 + g, dimensions
// 32 c + 8 t .. + 8, two k-steps of the product; Q takes the same places. Of V it has keys 2 t,
// 2 t + 1, 2 t + 8, 2 t + 9 and dimensions 8 g .. + 8 (and 64 + 8 g .. + 8): rows of V^T, once
// pairs of keys are interleaved. So a lane ends with 8 neighbours of the answer.
// FUSED: q, k and v of the new token come raw from their product; q and k are normed, turned and
// rounded here, k and v are written to the cache by the warp that has the request's last step; its
// sums begin with them. Nobody reads that slot in the same launch.
// A request and head that lies in several ranges is merged by the last warp to arrive, in order; if
// they are many, groups of neighbours first. A warp says that its pieces are there when it has done
// all its steps, so that copies never wait for an answer.
// SPLIT, for few requests: a CTA has one KV head, its warps take the steps of a request in turn and
// meet in shared memory. What is short is never merged through global memory then.
// `early`: all but q is older than the kernel before this one, so records, tables and old keys are
// read before that kernel has ended. A kernel begins when all CTAs of the one before it have said
// that it may, which they do when they have waited for the one before them: that one is complete.
//
// NEW tokens of each request, more than one only if SPLIT and FUSED: queries of a KV head are those
// of the first new token, then of the second, and so on. Of the new tokens each is a warp's, for
// whose queries the sums begin with it; queries of tokens before it do not see it, NaN or not. Of
// more than there are warps, some have two and more, one after the other.
//
// Compiled with: HEAD_DIM 64 or 128; GROUP query heads of a KV head, up to 16, and times NEW up to
// 32; NEW; KV_HEADS; WARPS of a CTA, which divides KV_HEADS if not SPLIT; BLOCK_SIZE, a multiple of
// 16; STAGES of the ring;
// RESIDENT CTAs of a multiprocessor; WINDOW, 0: none; SPLIT, NAMED_ROWS, FUSED, NORM, DEPENDENT
// (programmatic launch), BFLOAT16 (or float16) 0 or 1; BITS of a number of the cache and SCALED:
// 16 0 as queries are, 8 0 e4m3, 8 1 codes with a scale, 4 1 codes with a scale and a low.
//
// Numbers of fewer bits are multiplied as float16, which all of them are exactly, and so are the
// queries; scales come to scores and weights. Weights are levelled by their scaled size, so that
// none is above 1 and the largest loses nothing, however small values are. A head of 4 bits is
// turned by Hadamard's matrix: the lanes of a g do it with the query, and with the new key.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int KEYS = 16;                    // of a step
constexpr int CHUNKS = HEAD_DIM / 32;       // 16 bytes each, that a lane has of a key
constexpr int HALVES = HEAD_DIM / 64;       // 16 bytes each, that a lane has of a value
constexpr int ROW_BYTES = HEAD_DIM * BITS / 8;  // of a head of a token
constexpr int ROW_VECTORS = ROW_BYTES / 16;
constexpr int SCALES_AT = 2 * KEYS * ROW_VECTORS;  // in a step: 4 bytes of each key, then value
constexpr int STEP_VECTORS = SCALES_AT + SCALED * 8;  // of a warp
constexpr int SCALE_BYTES = BITS == 4 ? 4 : 2;     // of a head of a token: and its low
constexpr int QUERIES = GROUP * NEW;        // of a KV head
constexpr int COLUMNS = (QUERIES + 7) / 8;  // tiles of 8 queries
constexpr int ROWS = HEAD_DIM / 16;         // tiles of 16 dimensions of the answer
constexpr int COPIED_ROWS = 32 / ROW_VECTORS;  // of a head, by one copy of all lanes
constexpr int TOKEN_BYTES = 2 * KV_HEADS * ROW_BYTES;
constexpr int VALUE_BYTES = KV_HEADS * ROW_BYTES;  // from a token's keys to its values
// Of a program, an int a lane: request, nothing, step of it, steps of the range, steps of a full
// range; then of this request length, first token, the one after its last and row of the table, and
// the blocks of HEAD steps from here: nothing else has to be known for the first copies.
constexpr int RECORD = 32;
constexpr int LENGTH_AT = 5, TOKEN_AT = 6, AFTER_AT = 7, ROW_AT = 8, BLOCKS_AT = 9, HEAD = 8;
constexpr u32 ALL = 0xffffffffu;

extern __shared__ uint4 shared_ring[];

#ifdef __CUDACC__  // a test runs the rest on a CPU, with its own versions of these

#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 bytes; of nothing, 16 zeros.
__device__ __forceinline__ void copy_ahead(uint4* to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_ahead_if(uint4* to, const char* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_word_ahead_if(u32* to, const char* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(wanted ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void end_step_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int NEWER>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
}

// c += a @ b: a 16 x 16, b 16 x 8.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
#if BFLOAT16 && BITS == 16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of an 8 x 8 matrix with row g in lanes (g, 0 .. 3), two numbers each.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float low(u32 pair) {
#if BFLOAT16
  return __uint_as_float(pair << 16);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if BFLOAT16
  return __uint_as_float(pair & 0xffff0000u);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
#endif
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 pair;
#if BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

__device__ __forceinline__ float low_half(u32 pair) {
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
}

__device__ __forceinline__ float high_half(u32 pair) { return low_half(pair >> 16); }

__device__ __forceinline__ u32 pack_halves(float first, float second) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ u32 subtract_halves(u32 a, u32 b) {
  u32 c;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Two numbers of e4m3 in the low bytes of a word, and the other way: too large ones become 448.
__device__ __forceinline__ u32 halves_of_e4m3(u32 codes) {
  u32 pair;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(pair) : "r"(codes));
  return pair;
}

__device__ __forceinline__ u32 e4m3_of(float first, float second) {
  u32 codes;
  asm("{.reg .b16 l; cvt.rn.satfinite.e4m3x2.f32 l, %1, %2; mov.b32 %0, {l, 0};}"
      : "=r"(codes) : "f"(second), "f"(first));
  return codes;
}

__device__ __forceinline__ float log_two(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ int nearest(float x) { return __float2int_rn(x); }

// Past the L1 cache: other multiprocessors have written it.
__device__ __forceinline__ float4 load_part(const float* at) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ float load_number_of_part(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}

// Into the L2 cache.
__device__ __forceinline__ void fetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// How many came before. What the warp has written is seen by who arrives later.
__device__ __forceinline__ int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter)
               : "memory");
  return before;
}

#endif

__device__ __forceinline__ u32 word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ uint4 load_vector(const void* at) { return *(const uint4*)at; }

// Of a greatest score that nobody has seen yet: what to subtract, so that nothing becomes NaN.
__device__ __forceinline__ float level_of(float best) { return best == -INFINITE ? 0.0f : best; }

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// From the first query of a KV head to this one, where tokens and heads are so far apart.
__device__ __forceinline__ i64 query_at(int query, int token_step, int head_step) {
  if (NEW == 1) return (i64)query * head_step;
  return (i64)(query / GROUP) * token_step + (i64)(query % GROUP) * head_step;
}

struct Batch {
  const int* tables;
  const i64* table_rows;
  const int* seq_lens;
  const int* query_start;
  int table_stride;
  int num_requests;
};

struct Parts {
  float* sums;    // [slot, KV_HEADS, QUERIES, HEAD_DIM]
  float* best;    // [slot, KV_HEADS, QUERIES]
  float* totals;  // the same
  int* arrived;   // [request, KV_HEADS]
  int* groups_arrived;  // [slot, KV_HEADS], of a group of pieces at its first
};

// What of a request is visible, and the steps for what is of it in the cache: a new token that
// comes by itself is not. One without keys has one step, so that somebody writes the zeros.
struct Extent {
  int length, first_key, first_step, stop;
  int first_of_window;  // of the first new token, even if it would lie before the request
};

__device__ __forceinline__ Extent extent_of(int length, int num_new) {
  Extent e;
  e.length = length;
  e.first_of_window = WINDOW > 0 ? length - num_new - WINDOW + 1 : 0;
  e.first_key = max(e.first_of_window, 0);
  e.first_step = e.first_key / KEYS;
  e.stop = max(ceil_div(length - FUSED * NEW, KEYS), e.first_step + 1);
  return e;
}

// ---- Reading ahead ----------------------------------------------------------------------------

// Where 16 bytes of a key lie in a step of the ring, and of a value.
// Lanes read 16 bytes, 8 together, or 8 bytes of fewer bits, 16 together.
__device__ __forceinline__ int key_place(int row, int vector) {
  if (BITS == 16) return row * ROW_VECTORS + (vector ^ ((row & 1) << 2 | (row >> 1 & 3)));
  const int turned = ROW_VECTORS == 8 ? row & 3 : ROW_VECTORS == 4 ? row >> 1 & 1 : 0;
  return row * ROW_VECTORS + (vector ^ turned << 1);
}

__device__ __forceinline__ int value_place(int row, int vector) {
  if (BITS < 16 && ROW_VECTORS == 4) {
    const int at = (row & ~1) | ((row ^ row >> 1) & 1);
    return (KEYS + at) * ROW_VECTORS + (vector ^ (row >> 2 & 1) << 1);
  }
  const int turned = ROW_VECTORS < 4 ? 0 : row >> 1 & 3;
  return (KEYS + row) * ROW_VECTORS + (vector ^ turned << 1);
}

// Of one KV head: its first numbers, and where a lane's scales begin, lanes 0 .. 15 those of keys.
struct Cache {
  const char* keys;
  const char* scales;
  int head;
  int lane_scale;  // from the first scale of a token to the 4 bytes that have its own
};

__device__ __forceinline__ Cache cache_of(const void* numbers, const void* scales, int kv_head,
                                          int lane) {
  const int its = kv_head + lane / 16 * KV_HEADS;
  return {(const char*)numbers + kv_head * ROW_BYTES, (const char*)scales, kv_head,
          SCALE_BYTES * its & ~3};
}

// 16 keys from `key` on, and their values, of which those from `start` to `stop` are wanted.
__device__ __forceinline__ void copy_step(uint4* place, const Cache& cache, int block, int key,
                                          int start, int stop, int lane) {
  const int own_row = lane / ROW_VECTORS, vector = lane % ROW_VECTORS;
#if SCALED
  const int row = key + lane % 16;
  const i64 slot = (i64)block * BLOCK_SIZE + row % BLOCK_SIZE;
  copy_word_ahead_if((u32*)(place + SCALES_AT) + lane,
                     cache.scales + slot * (2 * KV_HEADS * SCALE_BYTES) + cache.lane_scale,
                     row >= start && row < stop);
#endif
  const char* from = cache.keys + (i64)block * (BLOCK_SIZE * TOKEN_BYTES);
  from += (key % BLOCK_SIZE + own_row) * TOKEN_BYTES + 16 * vector;
  const bool whole = key >= start && key + KEYS <= stop;
#pragma unroll
  for (int i = 0; i < KEYS; i += COPIED_ROWS) {
    const int row = i + own_row;
    const char* k_from = from + i * TOKEN_BYTES;
    if (whole) {
      copy_ahead(place + key_place(row, vector), k_from);
      copy_ahead(place + value_place(row, vector), k_from + VALUE_BYTES);
    } else {
      const bool wanted = key + row >= start && key + row < stop;
      copy_ahead_if(place + key_place(row, vector), k_from, wanted);
      copy_ahead_if(place + value_place(row, vector), k_from + VALUE_BYTES, wanted);
    }
  }
}

// Of 32 requests, one a lane.
struct Known {
  int from, length, num_new, row;

  __device__ __forceinline__ void load(const Batch& batch, int request, int lane) {
    from = request;
    const int mine = min(request + lane, batch.num_requests - 1);
    length = batch.seq_lens[mine];
    num_new = WINDOW > 0 ? min(batch.query_start[mine + 1] - batch.query_start[mine], 1) : 1;
    row = NAMED_ROWS ? (int)batch.table_rows[mine] : mine;
  }
};

// Up to 32 steps of a request; lane i has the block of step first + i.
struct Chunk {
  int request, first, count, block;
  Extent extent;
};

// A cursor over the steps of the range, ahead of the products. Blocks of a chunk are asked for when
// the chunk before begins.
struct Reader {
  Known known;
  Chunk now, next;
  int used;  // steps of `now`
  int left;  // steps of the range that are not read yet

  // At most `most` steps of the request, behind those that are skipped.
  __device__ __forceinline__ Chunk chunk(const Batch& batch, int request, int skipped, int most,
                                         int lane) {
    if (request >= known.from + 32) known.load(batch, request, lane);
    const int from = request - known.from;
    Chunk c;
    c.request = request;
    c.extent = extent_of(__shfl_sync(ALL, known.length, from),
                         WINDOW > 0 ? __shfl_sync(ALL, known.num_new, from) : 1);
    const int row = __shfl_sync(ALL, known.row, from);
    c.first = c.extent.first_step + skipped;
    c.count = min(min(c.extent.stop - c.first, 32), most);
    c.block = 0;
    const int step = c.first + lane;
    if (lane < c.count && step * KEYS < c.extent.length)
      c.block = batch.tables[(i64)row * batch.table_stride + step / (BLOCK_SIZE / KEYS)];
    return c;
  }

  __device__ __forceinline__ Chunk following(const Batch& batch, int lane) {
    const int most = left - now.count;
    if (most <= 0) {
      Chunk none = now;
      none.count = 0;
      return none;
    }
    const int after = now.first + now.count;
    const bool same = after < now.extent.stop;
    return chunk(batch, same ? now.request : now.request + 1,
                 same ? after - now.extent.first_step : 0, most, lane);
  }

  __device__ __forceinline__ void begin(const Batch& batch, int request, int tile, int num_steps,
                                        int lane) {
    left = num_steps;
    used = 0;
    known.load(batch, request, lane);
    now = chunk(batch, request, tile, left, lane);
    next = following(batch, lane);
  }

  // The next step of the range into its place of the ring.
  __device__ __forceinline__ void copy(const Batch& batch, uint4* place, const Cache& cache,
                                       int lane) {
    if (left == 0) return;
    if (used == now.count) {
      now = next;
      used = 0;
      next = following(batch, lane);
    }
    const int block = __shfl_sync(ALL, now.block, used);
    // The new token is not in the cache yet when it comes by itself.
    copy_step(place, cache, block, (now.first + used) * KEYS, now.extent.first_key,
              now.extent.length - FUSED, lane);
    ++used;
    --left;
  }
};

// ---- Numbers of fewer bits --------------------------------------------------------------------

#if BITS < 16
// 8 bytes of a row in the ring.
__device__ __forceinline__ uint2 piece(const uint4* row_of, int index) {
  return ((const uint2*)row_of)[index & 1];
}

// A code in the low bits of a float16 of 1024 is 1024 and the code; 4 bits further up in one of 64,
// it is 64 and the code. Codes of 8 bits have 128 added first. What is too much is taken off the
// scores of keys, all at once, and off values: of 4 bits MIDDLE too, so that what is rounded later
// is smaller.
constexpr float MIDDLE = 8.0f;
constexpr float TOO_MUCH = BITS == 8 ? 1152.0f : 1024.0f, TOO_MUCH_ABOVE = 64.0f;

// 8 codes of a key; of 4 bits those of the upper half of a head if `above`. Of 4 bits the numbers
// of each four come in the order 0, 2, 1, 3, as queries do.
__device__ __forceinline__ uint4 widened(const uint2& codes, bool above) {
#if !SCALED
  return make_uint4(halves_of_e4m3(codes.x), halves_of_e4m3(codes.x >> 16),
                    halves_of_e4m3(codes.y), halves_of_e4m3(codes.y >> 16));
#elif BITS == 8
  const u32 x = codes.x ^ 0x80808080, y = codes.y ^ 0x80808080, thousand = 0x64646464;
  return make_uint4(__byte_perm(x, thousand, 0x4140), __byte_perm(x, thousand, 0x4342),
                    __byte_perm(y, thousand, 0x4140), __byte_perm(y, thousand, 0x4342));
#else
  const u32 mask = above ? 0x00f000f0 : 0x000f000f, base = above ? 0x54005400 : 0x64006400;
  return make_uint4((codes.x & mask) | base, (codes.x >> 8 & mask) | base,
                    (codes.y & mask) | base, (codes.y >> 8 & mask) | base);
#endif
}

#if SCALED
// Byte `at` of the values of two neighbouring keys: code of the one, then of the other.
__device__ __forceinline__ u32 value_pair(const uint2& one, const uint2& other, int at,
                                          bool above) {
  const u32 a = at < 4 ? one.x : one.y, b = at < 4 ? other.x : other.y;
  const u32 both = __byte_perm(a, b, 0x4400 + 0x1111 * (at % 4));
  if (BITS == 8) return subtract_halves((both & 0x00ff00ff) ^ 0x64806480, 0x64806480);
  return above ? subtract_halves((both & 0x00f000f0) | 0x54005400, 0x54805480)
               : subtract_halves((both & 0x000f000f) | 0x64006400, 0x64086408);
}
#endif

// Head dimensions 32 c + 8 t .. + 8 times Sylvester's matrix, over the four lanes of each g.
__device__ __forceinline__ void hadamard(float (&x)[CHUNKS][8], int t) {
#pragma unroll
  for (int half = 1; half < 8; half *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if ((i & half) == 0) {
          const float a = x[c][i], b = x[c][i + half];
          x[c][i] = a + b;
          x[c][i + half] = a - b;
        }
#pragma unroll
  for (int other = 1; other < 4; other *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float its = __shfl_xor_sync(ALL, x[c][i], other);
        x[c][i] = t & other ? its - x[c][i] : x[c][i] + its;
      }
#pragma unroll
  for (int half = 1; half < CHUNKS; half *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if ((c & half) == 0) {
          const float a = x[c][i], b = x[c + half][i];
          x[c][i] = a + b;
          x[c + half][i] = a - b;
        }
  const float root = HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) x[c][i] *= root;
}

// The sum of a query's numbers, and of what its product with a key has too much.
struct Sums {
  float all, too_much;
};

// Pair j of 8 numbers that lie together begins with this one, and ends so many further on.
constexpr int APART = BITS == 4 ? 2 : 1;
__device__ __forceinline__ constexpr int pair_begin(int j) {
  return BITS == 4 ? j / 2 * 4 + j % 2 : 2 * j;
}

// A query of a head as products take it.
__device__ __forceinline__ Sums as_factor(uint4 (&head)[CHUNKS], int t) {
  float x[CHUNKS][8];
  Sums sums = {0.0f, 0.0f};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      x[c][i] = low(word(head[c], i / 2));
      x[c][i + 1] = high(word(head[c], i / 2));
    }
  if (BITS == 4) hadamard(x, t);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = pack_halves(x[c][pair_begin(j)], x[c][pair_begin(j) + APART]);
      const float its = low_half(pairs[j]) + high_half(pairs[j]);
      sums.all += its;
      sums.too_much += its * (BITS == 4 && c >= HALVES ? TOO_MUCH_ABOVE : TOO_MUCH);
    }
    head[c] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
#pragma unroll
  for (int other = 1; SCALED && other < 4; other *= 2) {
    sums.all += __shfl_xor_sync(ALL, sums.all, other);
    sums.too_much += __shfl_xor_sync(ALL, sums.too_much, other);
  }
  return sums;
}
#endif

#if FUSED && BITS < 16
// What codes of a head are multiplied by, and what is added then.
struct Scaling {
  float scale, low;
  float inverse;  // of the scale: a division for each number would be as much code as all the rest

  // Of the numbers x over the lanes that differ in the bits of `others`, as the cache keeps them.
  template <int COUNT>
  __device__ __forceinline__ void find(const float (&x)[COUNT][8], int others) {
    scale = inverse = 1.0f, low = 0.0f;
#if SCALED
    float least = x[0][0], most = x[0][0], broken = 0.0f;
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        least = fminf(least, x[c][i]);
        most = fmaxf(most, x[c][i]);
        broken += x[c][i] - x[c][i];  // NaN of what is not finite
      }
    if (BITS == 8) most = fmaxf(most, -least);
#pragma unroll
    for (int other = 1; other < 32; other *= 2)
      if (other & others) {
        least = fminf(least, __shfl_xor_sync(ALL, least, other));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, other));
        broken += __shfl_xor_sync(ALL, broken, other);
      }
    scale = kept((BITS == 8 ? most / 127.0f : (most - least) / 15.0f) + broken);
    if (BITS == 4) low = kept(least + broken);
    inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
#endif
  }

  // As float16 has it; NaN where that is not finite.
  static __device__ __forceinline__ float kept(float x) {
    const float y = low_half(pack_halves(x, 0.0f));
    return y + (y - y);
  }

  // A number as its code, in float.
  __device__ __forceinline__ float code(float x) const {
    const float least = BITS == 8 ? -127.0f : 0.0f, most = BITS == 8 ? 127.0f : 15.0f;
    return (float)nearest(fminf(fmaxf((x - low) * inverse, least), most));
  }

  __device__ __forceinline__ u32 bits() const { return pack_halves(scale, low); }
};

// Four codes as bytes.
__device__ __forceinline__ u32 bytes_of(const float* codes) {
#if !SCALED
  return e4m3_of(codes[0], codes[1]) | e4m3_of(codes[2], codes[3]) << 16;
#else
  return ((int)codes[0] & 0xff) | ((int)codes[1] & 0xff) << 8 | ((int)codes[2] & 0xff) << 16 |
         (u32)((int)codes[3] & 0xff) << 24;
#endif
}

// 8 numbers as codes that stand for them, each in a byte; x becomes what codes are multiplied as.
__device__ __forceinline__ uint2 encoded(float (&x)[8], const Scaling& scaling) {
#if SCALED
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = scaling.code(x[i]);
  return make_uint2(bytes_of(x), bytes_of(x + 4));
#else
  const uint2 codes = make_uint2(bytes_of(x), bytes_of(x + 4));
  const uint4 pairs = widened(codes, false);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    x[i] = low_half(word(pairs, i / 2));
    x[i + 1] = high_half(word(pairs, i / 2));
  }
  return codes;
#endif
}
#endif

// ---- The new token ----------------------------------------------------------------------------

#if FUSED
struct Turn {
  float cos[HALVES][8], sin[HALVES][8];

  // `rotation`: cosines of the position, then sines with the first half negated.
  __device__ __forceinline__ void load(const float* rotation, int t) {
#pragma unroll
    for (int c = 0; c < HALVES; ++c) {
      const float* at = rotation + 32 * c + 8 * t;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 x = *(const float4*)(at + i);
        const float4 y = *(const float4*)(at + HEAD_DIM + HEAD_DIM / 2 + i);
        cos[c][i] = x.x, cos[c][i + 1] = x.y, cos[c][i + 2] = x.z, cos[c][i + 3] = x.w;
        sin[c][i] = y.x, sin[c][i + 1] = y.y, sin[c][i + 2] = y.z, sin[c][i + 3] = y.w;
      }
    }
  }
};

// Norm and rotation of a head that lies over the four lanes of each g.
__device__ __forceinline__ void turn_numbers(float (&x)[CHUNKS][8], const uint4 (&head)[CHUNKS],
                                             const Turn& turn, const u16* weight, float eps,
                                             int t) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      x[c][i] = low(word(head[c], i / 2));
      x[c][i + 1] = high(word(head[c], i / 2));
    }
#if NORM
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[c][i] * x[c][i];
  squares += __shfl_xor_sync(ALL, squares, 1);
  squares += __shfl_xor_sync(ALL, squares, 2);
  const float scale = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint4 w = load_vector(weight + 32 * c + 8 * t);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      x[c][i] = x[c][i] * scale * low(word(w, i / 2));
      x[c][i + 1] = x[c][i + 1] * scale * high(word(w, i / 2));
    }
  }
#endif
#pragma unroll
  for (int c = 0; c < HALVES; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = x[c][i], b = x[c + HALVES][i];
      x[c][i] = a * turn.cos[c][i] - b * turn.sin[c][i];
      x[c + HALVES][i] = b * turn.cos[c][i] + a * turn.sin[c][i];
    }
}

// And rounding.
__device__ __forceinline__ void turn_head(uint4 (&head)[CHUNKS], const Turn& turn,
                                          const u16* weight, float eps, int t) {
  float x[CHUNKS][8];
  turn_numbers(x, head, turn, weight, eps, t);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    head[c] = make_uint4(pack(x[c][0], x[c][1]), pack(x[c][2], x[c][3]), pack(x[c][4], x[c][5]),
                         pack(x[c][6], x[c][7]));
}

__device__ __forceinline__ void turn_all(uint4 (&q)[COLUMNS][CHUNKS], const Turn& turn,
                                         const u16* weight, float eps, int t) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) turn_head(q[n], turn, weight, eps, t);
}

// The new token of a KV head, its key in the places of products.
#if BITS == 16
struct NewToken {
  uint4 k[CHUNKS];

  // `key`: as it comes from the product, with its value behind the keys of all heads. Both to the
  // cache, if `slot` is one.
  __device__ __forceinline__ void take(const u16* key, const Turn& turn, const u16* weight,
                                       float eps, const Cache& cache, i64 slot, int lane) {
    const int t = lane % 4;
    char* cached = slot < 0 ? nullptr : (char*)cache.keys + slot * TOKEN_BYTES;
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) k[c] = load_vector(key + 32 * c + 8 * t);
    if (lane < ROW_VECTORS) v = load_vector(key + KV_HEADS * HEAD_DIM + 8 * lane);
    turn_head(k, turn, weight, eps, t);
    if (lane < 4 && cached) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) *(uint4*)(cached + 64 * c + 16 * t) = k[c];
    }
    if (lane < ROW_VECTORS && cached) *(uint4*)(cached + VALUE_BYTES + 16 * lane) = v;
  }

  // Of query head g of a tile, for all its lanes.
  __device__ __forceinline__ float score(const uint4 (&q)[CHUNKS], float scale_log2) const {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 a = word(q[c], i), b = word(k[c], i);
        sum += low(a) * low(b) + high(a) * high(b);
      }
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    return sum * scale_log2;
  }
};
#else
struct NewToken {
  float k[CHUNKS][8];  // codes
  float v[HALVES][8];  // of dimensions 64 h + 8 g .. + 8, the numbers themselves
  Scaling of_key;

  // As above.
  __device__ __forceinline__ void take(const u16* key, const Turn& turn, const u16* weight,
                                       float eps, const Cache& cache, i64 slot, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint4 raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) raw[c] = load_vector(key + 32 * c + 8 * t);
    turn_numbers(k, raw, turn, weight, eps, t);
    if (BITS == 4) hadamard(k, t);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const uint4 its = load_vector(key + KV_HEADS * HEAD_DIM + 64 * h + 8 * g);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        v[h][i] = low(word(its, i / 2));
        v[h][i + 1] = high(word(its, i / 2));
      }
    }
    Scaling of_value;
    of_key.find(k, 3);
    of_value.find(v, 28);
    uint2 k_codes[CHUNKS], v_codes[HALVES];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) k_codes[c] = encoded(k[c], of_key);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      v_codes[h] = encoded(v[h], of_value);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[h][i] = v[h][i] * of_value.scale + of_value.low;
    }
    put(cache, slot, k_codes, v_codes, of_value, lane);
  }

  __device__ __forceinline__ void put(const Cache& cache, i64 slot,
                                      const uint2 (&k_codes)[CHUNKS],
                                      const uint2 (&v_codes)[HALVES], const Scaling& of_value,
                                      int lane) const {
    const int g = lane / 4, t = lane % 4;
    char* its_k = (char*)cache.keys + (slot < 0 ? 0 : slot) * TOKEN_BYTES;
    char* its_v = its_k + VALUE_BYTES;
#if BITS == 8
    if (g == 0 && slot >= 0) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) *(uint2*)(its_k + 32 * c + 8 * t) = k_codes[c];
    }
    if (t == 0 && slot >= 0) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h) *(uint2*)(its_v + 64 * h + 8 * g) = v_codes[h];
    }
#else
    if (g == 0 && slot >= 0) {
#pragma unroll
      for (int c = 0; c < HALVES; ++c) *(uint2*)(its_k + 32 * c + 8 * t) =
          make_uint2(k_codes[c].x | k_codes[c + HALVES].x << 4,
                     k_codes[c].y | k_codes[c + HALVES].y << 4);
    }
    // The other half of a head: the next codes, or those of lanes further on.
    uint2 above = v_codes[HALVES - 1];
    if (HALVES == 1)
      above = make_uint2(__shfl_xor_sync(ALL, above.x, 16), __shfl_xor_sync(ALL, above.y, 16));
    if (t == 0 && slot >= 0 && 8 * g < HEAD_DIM / 2)
      *(uint2*)(its_v + 8 * g) =
          make_uint2(v_codes[0].x | above.x << 4, v_codes[0].y | above.y << 4);
#endif
#if SCALED
    if (lane == 0 && slot >= 0) {
      char* scales = (char*)cache.scales + slot * (2 * KV_HEADS * SCALE_BYTES);
      put_scale(scales + cache.head * SCALE_BYTES, of_key);
      put_scale(scales + (cache.head + KV_HEADS) * SCALE_BYTES, of_value);
    }
#endif
  }

  static __device__ __forceinline__ void put_scale(char* to, const Scaling& scaling) {
    const u32 bits = scaling.bits();
    if (BITS == 4)
      *(u32*)to = bits;
    else
      *(u16*)to = (u16)bits;
  }

  __device__ __forceinline__ float score(const uint4 (&q)[CHUNKS], float scale_log2) const {
    float sum = 0.0f, all = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = low_half(word(q[c], j)), b = high_half(word(q[c], j));
        sum += a * k[c][pair_begin(j)] + b * k[c][pair_begin(j) + APART];
        all += a + b;
      }
    sum = sum * of_key.scale + all * of_key.low;
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    return sum * scale_log2;
  }
};
#endif
#endif

// ---- Products ---------------------------------------------------------------------------------

// Of one request and KV head: lane (g, t) has heads 2 t and 2 t + 1 of each column tile.
struct Answer {
  uint4 q[COLUMNS][CHUNKS];      // head g of the tile, dimensions 32 c + 8 t .. + 8
  float best[COLUMNS][2];        // greatest score so far, in powers of two
  float total[COLUMNS][2];       // sum of the weights of this lane's keys
  float sum[ROWS][COLUMNS][4];   // of weighted values
  float all[COLUMNS][2];         // of codes: sums of the query's numbers
  float too_much[COLUMNS][2];    // and what scores have too much
  float lows[COLUMNS][2];        // and of what is added to each value, weighted, of its keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      best[n][0] = best[n][1] = -INFINITE;
      total[n][0] = total[n][1] = 0.0f;
      all[n][0] = all[n][1] = lows[n][0] = lows[n][1] = 0.0f;
      too_much[n][0] = too_much[n][1] = 0.0f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        sum[r][n][0] = sum[r][n][1] = sum[r][n][2] = sum[r][n][3] = 0.0f;
    }
  }

  // Queries as products take them.
  __device__ __forceinline__ void prepare(int lane, float scale_log2) {
#if BITS < 16
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const Sums its = as_factor(q[n], t);
#pragma unroll
      for (int odd = 0; SCALED && odd < 2; ++odd) {
        const int lane_of_it = 4 * (2 * t + odd);
        all[n][odd] = __shfl_sync(ALL, its.all, lane_of_it) * scale_log2;
        too_much[n][odd] = __shfl_sync(ALL, its.too_much, lane_of_it) * scale_log2;
      }
    }
#endif
  }

#if FUSED
  // New tokens first. `value`: its own, of this KV head; `number`: of the request's new ones. One of
  // several of a warp is added to those before it, as keys of the cache are.
  __device__ __forceinline__ void begin_with(const NewToken& fresh, const u16* value, int number,
                                             int lane, float scale_log2) {
    const int g = lane / 4, t = lane % 4;
    constexpr bool ALONE = NEW <= WARPS;
#if BITS == 16
    uint4 v[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) v[h] = load_vector(value + 64 * h + 8 * g);
#endif
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float its = fresh.score(q[n], scale_log2);
      bool sees[2];
      float fade[2], weight[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int behind = (8 * n + 2 * t + odd) / GROUP - number;
        sees[odd] = NEW == 1 || (behind >= 0 && (WINDOW == 0 || behind < WINDOW));
        const float score = __shfl_sync(ALL, its, 4 * (2 * t + odd));
        const float most = sees[odd] ? score : -INFINITE;
        if (ALONE) {
          best[n][odd] = most;
          total[n][odd] = g == 0 && sees[odd] ? 1.0f : 0.0f;
        } else if (sees[odd]) {
          const float before = best[n][odd];
          best[n][odd] = fmaxf(before, most);
          const float level = level_of(best[n][odd]);
          fade[odd] = power_of_two(before - level);
          weight[odd] = power_of_two(most - level);
          total[n][odd] = total[n][odd] * fade[odd] + (g == 0 ? weight[odd] : 0.0f);
        }
      }
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#if BITS == 16
          const u32 pair = word(v[h], i / 2);
          const float x = i % 2 ? high(pair) : low(pair);
#else
          const float x = fresh.v[h][i];
#endif
          const int r = HALVES == 2 ? i : i / 2, at = HALVES == 2 ? 2 * h : i % 2 * 2;
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            float& its_sum = sum[r][n][at + odd];
            if (ALONE)
              its_sum = sees[odd] ? x : 0.0f;
            else if (sees[odd])
              its_sum = its_sum * fade[odd] + x * weight[odd];
          }
        }
    }
  }
#endif

  // Number i of half h of the answer of the odd or even head: dimension 64 h + 8 g + i.
  __device__ __forceinline__ float at(int n, int odd, int h, int i) const {
    return HALVES == 2 ? sum[i][n][2 * h + odd] : sum[i / 2][n][i % 2 * 2 + odd];
  }

  // Dimensions 32 c + 8 t .. + 8 of a key of the ring.
  static __device__ __forceinline__ uint4 key_numbers(const uint4* place, int row, int c, int t) {
#if BITS == 16
    return place[key_place(row, 4 * c + t)];
#else
    const int at = 4 * (BITS == 4 ? c % HALVES : c) + t;
    return widened(piece(place + key_place(row, at / 2), at), c >= HALVES);
#endif
  }

#if SCALED
  using Value = uint2;
#else
  using Value = uint4;
#endif

  // Dimensions 64 h + 8 g .. + 8 of a value; of codes the bytes that have them.
  static __device__ __forceinline__ Value value_numbers(const uint4* place, int row, int h,
                                                        int g) {
#if BITS == 16
    return place[value_place(row, 8 * h + g)];
#elif !SCALED
    return widened(piece(place + value_place(row, 4 * h + g / 2), g), false);
#else
    const int at = BITS == 8 ? 8 * h + g : HALVES == 2 ? g : g % 4;
    return piece(place + value_place(row, at / 2), at);
#endif
  }

  // Scores of a step's 16 keys: [n][0], [1] of key g, [2], [3] of key 8 + g.
  __device__ __forceinline__ void score(float (&s)[COLUMNS][4], const uint4* place, int lane,
                                        float scale_log2) const {
    const int g = lane / 4, t = lane % 4;
    float odd[COLUMNS][4];  // half of the products: a chain is as long as it is slow
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const uint4 a = key_numbers(place, g, c, t), b = key_numbers(place, 8 + g, c, t);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        multiply(s[n], a.x, b.x, a.y, b.y, q[n][c].x, q[n][c].y);
        multiply(odd[n], a.z, b.z, a.w, b.w, q[n][c].z, q[n][c].w);
      }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = (s[n][i] + odd[n][i]) * scale_log2;
  }

  // What the values of keys g and 8 + g are scaled by, and what is added to them.
  struct Scales {
    float v[2], level[2], low[2];
  };

  // Scores as scales make them.
  __device__ __forceinline__ void scale_scores(float (&s)[COLUMNS][4], Scales& scales,
                                               const uint4* place, int kv_head,
                                               int lane) const {
#if SCALED
    const u32* words = (const u32*)(place + SCALES_AT) + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 of_key = words[8 * half], of_value = words[KEYS + 8 * half];
      if (BITS == 8) {
        of_key >>= kv_head % 2 * 16;
        of_value >>= (kv_head + KV_HEADS) % 2 * 16;
      }
      const float scale = low_half(of_key), low = BITS == 4 ? high_half(of_key) : 0.0f;
      scales.v[half] = low_half(of_value);
      scales.level[half] = log_two(fmaxf(scales.v[half], 0x1p-24f));
      scales.low[half] = BITS == 4 ? high_half(of_value) + MIDDLE * scales.v[half] : 0.0f;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          s[n][2 * half + odd] = (s[n][2 * half + odd] - too_much[n][odd]) * scale;
          if (BITS == 4) s[n][2 * half + odd] += all[n][odd] * low;
        }
    }
#endif
  }

  // Scores to weights, as the product with V takes them; what was summed fades accordingly.
  __device__ __forceinline__ void weigh(u32 (&p)[COLUMNS][2], float (&s)[COLUMNS][4],
                                        const Scales& scales) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      float most[2], fade[2], level[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        most[i] = SCALED ? fmaxf(s[n][i] + scales.level[0], s[n][2 + i] + scales.level[1])
                         : fmaxf(s[n][i], s[n][2 + i]);
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          most[i] = fmaxf(most[i], __shfl_xor_sync(ALL, most[i], other));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[i] = fmaxf(most[i], best[n][i]);
        level[i] = level_of(most[i]);
        fade[i] = power_of_two(best[n][i] - level[i]);
        best[n][i] = most[i];
        s[n][i] = power_of_two(s[n][i] - level[i]);
        s[n][2 + i] = power_of_two(s[n][2 + i] - level[i]);
        total[n][i] = total[n][i] * fade[i] + (s[n][i] + s[n][2 + i]);
        if (BITS == 4)
          lows[n][i] = lows[n][i] * fade[i] +
                       (s[n][i] * scales.low[0] + s[n][2 + i] * scales.low[1]);
        if (SCALED) {
          s[n][i] *= scales.v[0];
          s[n][2 + i] *= scales.v[1];
        }
      }
#if BITS == 16
      p[n][0] = transpose(pack(s[n][0], s[n][1]));
      p[n][1] = transpose(pack(s[n][2], s[n][3]));
#else
      p[n][0] = transpose(pack_halves(s[n][0], s[n][1]));
      p[n][1] = transpose(pack_halves(s[n][2], s[n][3]));
#endif
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        sum[r][n][0] *= fade[0], sum[r][n][2] *= fade[0];
        sum[r][n][1] *= fade[1], sum[r][n][3] *= fade[1];
      }
    }
  }

  __device__ __forceinline__ void add(const u32 (&p)[COLUMNS][2], const Value (&v)[4][HALVES],
                                      int g) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#if SCALED
      // Rows g and 8 + g of the tile: number r of both halves, or numbers 2 r and 2 r + 1. Of 4
      // bits both halves lie in one byte, or this lane's are all below or all above.
      const int h = HALVES == 2 && BITS == 8 ? 1 : 0;
      const int at = HALVES == 2 ? r : 2 * r, next = HALVES == 2 ? r : at + 1;
      const bool up = HALVES == 1 && g >= 4, next_up = HALVES == 2 || up;
      const u32 a0 = value_pair(v[0][0], v[1][0], at, up);
      const u32 a1 = value_pair(v[0][h], v[1][h], next, next_up);
      const u32 a2 = value_pair(v[2][0], v[3][0], at, up);
      const u32 a3 = value_pair(v[2][h], v[3][h], next, next_up);
#else
      // Rows g and 8 + g of the tile: the same number of both halves, or neighbours.
      const int h = HALVES == 2 ? 1 : 0, w = HALVES == 2 ? r / 2 : r;
      const u32 upper = HALVES == 2 && r % 2 == 1 ? 0x7632 : 0x5410;
      const u32 lower = HALVES == 2 ? upper : 0x7632;
      const u32 a0 = __byte_perm(word(v[0][0], w), word(v[1][0], w), upper);
      const u32 a1 = __byte_perm(word(v[0][h], w), word(v[1][h], w), lower);
      const u32 a2 = __byte_perm(word(v[2][0], w), word(v[3][0], w), upper);
      const u32 a3 = __byte_perm(word(v[2][h], w), word(v[3][h], w), lower);
#endif
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) multiply(sum[r][n], a0, a1, a2, a3, p[n][0], p[n][1]);
    }
  }

  // The 16 keys from `key` on, and their values, of which those from `start` to `stop` count, and
  // for a query those from `first_of_window` and its token's number on.
  __device__ __forceinline__ void take_step(const uint4* place, int key, int start, int stop,
                                            int first_of_window, int kv_head, int lane,
                                            float scale_log2) {
    const int g = lane / 4, t = lane % 4;
    float s[COLUMNS][4];
    Scales scales;
    score(s, place, lane, scale_log2);
    scale_scores(s, scales, place, kv_head, lane);
    if (key < start || key + KEYS > stop) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int its_key = key + g + i / 2 * 8;
        if (its_key < start || its_key >= stop) {
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) s[n][i] = -INFINITE;
        }
      }
    }
    if (NEW > 1 && WINDOW > 0 && key < first_of_window + NEW - 1) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (key + g + i / 2 * 8 < first_of_window + (8 * n + 2 * t + i % 2) / GROUP)
            s[n][i] = -INFINITE;
    }
    u32 p[COLUMNS][2];
    weigh(p, s, scales);
    Value v[4][HALVES];
#pragma unroll
    for (int i = 0; i < 4 * HALVES; ++i) {
      const int token = i / HALVES % 2 + i / HALVES / 2 * 8;
      v[i / HALVES][i % HALVES] = value_numbers(place, 2 * t + token, i % HALVES, g);
    }
    add(p, v, g);
  }

  __device__ __forceinline__ void add_up_totals() {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          total[n][i] += __shfl_xor_sync(ALL, total[n][i], other);
          if (BITS == 4) lows[n][i] += __shfl_xor_sync(ALL, lows[n][i], other);
        }
#if BITS == 4
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][n][i] += lows[n][i % 2];
#endif
  }

  // `out`: the first query head of the KV head.
  __device__ __forceinline__ void store(u16* out, int out_head, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int head = 8 * n + 2 * t + odd;
        const float all = total[n][odd], share = 1.0f / (all == 0.0f ? 1.0f : all);
        if (head < QUERIES) {
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              pairs[i] = pack(at(n, odd, h, 2 * i) * share, at(n, odd, h, 2 * i + 1) * share);
            *(uint4*)(out + (i64)head * out_head + 64 * h + 8 * g) =
                make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          }
        }
      }
  }

  // A head to every `row` numbers of `sums`.
  __device__ __forceinline__ void leave(float* sums, int row, float* its_best, float* its_total,
                                        int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int head = 8 * n + 2 * t + odd;
        if (head < QUERIES) {
          if (g == 0) {
            its_best[head] = best[n][odd];
            its_total[head] = total[n][odd];
          }
          float* to = sums + head * row + 8 * g;
#pragma unroll
          for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int i = 0; i < 8; i += 4)
              *(float4*)(to + 64 * h + i) = make_float4(at(n, odd, h, i), at(n, odd, h, i + 1),
                                                        at(n, odd, h, i + 2), at(n, odd, h, i + 3));
        }
      }
  }
};

// ---- Merging ----------------------------------------------------------------------------------

constexpr int MERGED_VECTORS = (QUERIES * HEAD_DIM + 127) / 128;  // four numbers each, of a lane
constexpr int FAN = 12;  // pieces that a warp merges one after the other
constexpr int AT_ONCE = MERGED_VECTORS < 16 ? 16 / MERGED_VECTORS : 1;  // pieces on their way

// The whole warp is the last of `all` that come to this counter, which is then free again.
__device__ __forceinline__ bool is_last(int* counter, int all, int lane) {
  __syncwarp();
  int before = 0;
  if (lane == 0) before = arrive(counter);
  before = __shfl_sync(ALL, before, 0);
  __syncwarp();
  if (before != all - 1) return false;
  if (lane == 0) *counter = 0;
  return true;
}

// Pieces of a request and KV head in their order: each `stride`-th from `first_program` on. Piece j
// lies in slot 2 * its program, and one further if j is 0 and it is `late`. To `out`; or, if that
// is null, to where the first of them lay.
__device__ __forceinline__ void merge(const Parts& parts, int first_program, int stride, int pieces,
                                      int late, int kv_head, u16* out, int out_head, int lane) {
  float best[MERGED_VECTORS], total[MERGED_VECTORS];
  float4 sum[MERGED_VECTORS];
#pragma unroll
  for (int v = 0; v < MERGED_VECTORS; ++v) {
    best[v] = -INFINITE;
    total[v] = 0.0f;
    sum[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int j = 0; j < pieces; j += AT_ONCE) {
    float its_best[AT_ONCE][MERGED_VECTORS], its_total[AT_ONCE][MERGED_VECTORS];
    float4 its_sum[AT_ONCE][MERGED_VECTORS];
#pragma unroll
    for (int w = 0; w < AT_ONCE; ++w) {
      const int slot = 2 * (first_program + (j + w) * stride) + (j + w == 0 ? late : 0);
      const int place = (slot * KV_HEADS + kv_head) * QUERIES;
#pragma unroll
      for (int v = 0; v < MERGED_VECTORS; ++v) {
        const int number = 128 * v + 4 * lane;
        its_best[w][v] = -INFINITE;
        its_total[w][v] = 0.0f;
        its_sum[w][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (j + w < pieces && number < QUERIES * HEAD_DIM) {
          its_best[w][v] = load_number_of_part(parts.best + place + number / HEAD_DIM);
          its_total[w][v] = load_number_of_part(parts.totals + place + number / HEAD_DIM);
          its_sum[w][v] = load_part(parts.sums + (i64)place * HEAD_DIM + number);
        }
      }
    }
#pragma unroll
    for (int w = 0; w < AT_ONCE; ++w)
#pragma unroll
      for (int v = 0; v < MERGED_VECTORS; ++v) {
        const float most = fmaxf(best[v], its_best[w][v]), level = level_of(most);
        const float fade = power_of_two(best[v] - level);
        const float its_fade = power_of_two(its_best[w][v] - level);
        best[v] = most;
        total[v] = total[v] * fade + its_total[w][v] * its_fade;
        sum[v].x = sum[v].x * fade + its_sum[w][v].x * its_fade;
        sum[v].y = sum[v].y * fade + its_sum[w][v].y * its_fade;
        sum[v].z = sum[v].z * fade + its_sum[w][v].z * its_fade;
        sum[v].w = sum[v].w * fade + its_sum[w][v].w * its_fade;
      }
  }
  __syncwarp();  // all have read what is written over now
#pragma unroll
  for (int v = 0; v < MERGED_VECTORS; ++v) {
    const int number = 128 * v + 4 * lane;
    if (number < QUERIES * HEAD_DIM && out == nullptr) {
      const int at = ((2 * first_program + late) * KV_HEADS + kv_head) * QUERIES;
      *(float4*)(parts.sums + (i64)at * HEAD_DIM + number) = sum[v];
      if (number % HEAD_DIM == 0) {
        parts.best[at + number / HEAD_DIM] = best[v];
        parts.totals[at + number / HEAD_DIM] = total[v];
      }
    } else if (number < QUERIES * HEAD_DIM) {
      const float share = 1.0f / (total[v] == 0.0f ? 1.0f : total[v]);
      u16* to = out + (i64)(number / HEAD_DIM) * out_head + number % HEAD_DIM;
      *(uint2*)to = make_uint2(pack(sum[v].x * share, sum[v].y * share),
                               pack(sum[v].z * share, sum[v].w * share));
    }
  }
}

#if SPLIT
// ---- The kernel for few requests --------------------------------------------------------------

// A CTA has one KV head; its warps take the steps of a request in turn and meet in shared memory.
constexpr int ROW_NUMBERS = HEAD_DIM + 4;  // from one head of a warp's part to the next
constexpr int PART_VECTORS = QUERIES * ROW_NUMBERS / 4;
constexpr int WARP_VECTORS =
    STAGES * STEP_VECTORS > PART_VECTORS ? STAGES * STEP_VECTORS : PART_VECTORS;
constexpr int QUADS = QUERIES * HEAD_DIM / 4;  // of numbers of the answer

// The parts of a request and KV head that the warps have left, four numbers from `number` on.
// `most`: the greatest score of all.
__device__ __forceinline__ float4 sum_of_parts(const float* bests, const float* totals, int number,
                                               float& most, float& total) {
  const int head = number / HEAD_DIM, dim = number % HEAD_DIM;
  most = -INFINITE;
#pragma unroll
  for (int p = 0; p < WARPS; ++p) most = fmaxf(most, bests[p * QUERIES + head]);
  const float level = level_of(most);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  total = 0.0f;
#pragma unroll
  for (int p = 0; p < WARPS; ++p) {
    const float fade = power_of_two(bests[p * QUERIES + head] - level);
    const float* part = (const float*)(shared_ring + p * WARP_VECTORS) + head * ROW_NUMBERS;
    const float4 x = *(const float4*)(part + dim);
    total += totals[p * QUERIES + head] * fade;
    sum.x += x.x * fade;
    sum.y += x.y * fade;
    sum.z += x.z * fade;
    sum.w += x.w * fade;
  }
  return sum;
}

__device__ __forceinline__ void store_answer(u16* out, int out_row, int out_head, int number,
                                             const float4& sum, float total) {
  const float share = 1.0f / (total == 0.0f ? 1.0f : total);
  *(uint2*)(out + query_at(number / HEAD_DIM, out_row, out_head) + number % HEAD_DIM) =
      make_uint2(pack(sum.x * share, sum.y * share), pack(sum.z * share, sum.w * share));
}

// As `merge`, by all threads of the CTA.
__device__ __forceinline__ void merge_pieces(const Parts& parts, int first_program, int pieces,
                                             int late, int kv_head, u16* out, int out_row,
                                             int out_head) {
  constexpr int TOGETHER = 8;
  for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32) {
    const int number = 4 * quad;
    float best = -INFINITE, total = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int j = 0; j < pieces; j += TOGETHER) {
      float its_best[TOGETHER], its_total[TOGETHER];
      float4 its_sum[TOGETHER];
#pragma unroll
      for (int w = 0; w < TOGETHER; ++w) {
        const int slot = 2 * (first_program + j + w) + (j + w == 0 ? late : 0);
        const int place = (slot * KV_HEADS + kv_head) * QUERIES;
        its_best[w] = -INFINITE;
        its_total[w] = 0.0f;
        its_sum[w] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (j + w < pieces) {
          its_best[w] = load_number_of_part(parts.best + place + number / HEAD_DIM);
          its_total[w] = load_number_of_part(parts.totals + place + number / HEAD_DIM);
          its_sum[w] = load_part(parts.sums + (i64)place * HEAD_DIM + number);
        }
      }
#pragma unroll
      for (int w = 0; w < TOGETHER; ++w) {
        const float most = fmaxf(best, its_best[w]), level = level_of(most);
        const float fade = power_of_two(best - level), its_fade = power_of_two(its_best[w] - level);
        best = most;
        total = total * fade + its_total[w] * its_fade;
        sum.x = sum.x * fade + its_sum[w].x * its_fade;
        sum.y = sum.y * fade + its_sum[w].y * its_fade;
        sum.z = sum.z * fade + its_sum[w].z * its_fade;
        sum.w = sum.w * fade + its_sum[w].w * its_fade;
      }
    }
    store_answer(out, out_row, out_head, number, sum, total);
  }
}

// Grid: programs, KV_HEADS. Shared memory: WARPS * WARP_VECTORS times 16 bytes, WARPS * QUERIES * 2
// + 1 times 4 bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
paged_decode_split(const u16* q, void* numbers, u16* out, const int* tables, const i64* table_rows,
                   const int* seq_lens, const int* query_start, const i64* slots,
                   const float* rotations, const u16* q_weight, const u16* k_weight,
                   const int* records, float* part_sums, float* part_best, float* part_totals,
                   int* arrived, int* groups_arrived, int num_requests, int table_stride,
                   int q_row, int q_head, int out_row, int out_head, float scale_log2, float eps,
                   int early, void* scales, int num_positions) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int program = blockIdx.x, kv_head = blockIdx.y;
#if DEPENDENT
  if (!early) wait_for_kernel_before();
#endif
  const int record = records[program * RECORD + lane];
  int request = __shfl_sync(ALL, record, 0), tile = __shfl_sync(ALL, record, 2);
  int left = __shfl_sync(ALL, record, 3), done = 0;
  const int share = __shfl_sync(ALL, record, 4);
  if (left == 0) return;

  uint4* ring = shared_ring + warp * WARP_VECTORS;
  float* bests = (float*)(shared_ring + WARPS * WARP_VECTORS);
  float* totals = bests + WARPS * QUERIES;
  int* is_last_one = (int*)(totals + WARPS * QUERIES);
  const Parts parts = {part_sums, part_best, part_totals, arrived, groups_arrived};
  const Cache cache = cache_of(numbers, scales, kv_head, lane);

  while (left > 0) {
    int length = __shfl_sync(ALL, record, LENGTH_AT), row = __shfl_sync(ALL, record, ROW_AT);
    int token = __shfl_sync(ALL, record, TOKEN_AT), after = __shfl_sync(ALL, record, AFTER_AT);
    if (done > 0) {
      length = seq_lens[request];
      token = query_start[request], after = query_start[request + 1];
      row = NAMED_ROWS ? (int)table_rows[request] : request;
    }
    const bool asked = after > token;
    const Extent extent = extent_of(length, min(after - token, NEW));
    const int steps = extent.stop - extent.first_step;
    const int count = min(left, steps - tile);
    const int first = extent.first_step + tile, last = first + count;
    const int stop = length - FUSED * NEW;  // of the keys that are in the cache
    const int read_last = min(last, stop > 0 ? ceil_div(stop, KEYS) : 0);
    const int own_first = first + warp;
    const int own = read_last > own_first ? ceil_div(read_last - own_first, WARPS) : 0;
    const int* table = tables + (i64)row * table_stride;
    const bool has_new = FUSED && last == extent.stop && length > 0 && asked;
    int own_new = WARPS - 1 - warp;  // the last warps have the fewest steps

    int block = 0;  // lane i: of own step i, then 32 + i, ...
    auto copy = [&](int i) {
      if (i % 32 == 0) {
        const int ahead = own_first + WARPS * (i + lane);
        block = ahead < read_last ? table[ahead / (BLOCK_SIZE / KEYS)] : 0;
      }
      const bool at_once = i == 0 && done == 0 && warp < HEAD;
      const int its_block =
          at_once ? __shfl_sync(ALL, record, BLOCKS_AT + warp) : __shfl_sync(ALL, block, i % 32);
      copy_step(ring + i % STAGES * STEP_VECTORS, cache, its_block, (own_first + WARPS * i) * KEYS,
                extent.first_key, stop, lane);
    };
    for (int i = 0; i < STAGES; ++i) {
      if (i < own) copy(i);
      end_step_of_copies();
    }
#if FUSED
    // Of new token `number`. What has no block may have no place in the table either.
    auto rotation = [&](int number) {
      int position = max(length - NEW + min(number, NEW - 1), 0);
      if (NEW > 1) position = min(position, num_positions - 1);
      return rotations + (i64)position * 2 * HEAD_DIM;
    };
    Turn turn;
    turn.load(rotation(NEW == 1 ? 0 : g / GROUP), t);
    i64 new_slot = -1;
    if (has_new && own_new < NEW) new_slot = slots[token + own_new];
#if NORM
    if (done == 0) fetch((warp == 0 ? k_weight : q_weight) + 8 * lane % HEAD_DIM);
#endif
#endif
#if DEPENDENT
    if (done == 0) {
      wait_for_kernel_before();
      let_next_kernel_begin();
    }
#endif

    Answer answer;
    answer.clear();
    const u16* its_q = q + (i64)token * q_row + (i64)kv_head * GROUP * q_head;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        answer.q[n][c] = make_uint4(0, 0, 0, 0);
        if (8 * n + g < QUERIES && asked)
          answer.q[n][c] = load_vector(its_q + query_at(8 * n + g, q_row, q_head) + 32 * c + 8 * t);
      }
#if FUSED
    if (length > 0 && asked) {
#if NEW == 1
      turn_all(answer.q, turn, q_weight, eps, t);
#else
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        if (n > 0) turn.load(rotation((8 * n + g) / GROUP), t);
        turn_head(answer.q[n], turn, q_weight, eps, t);
      }
#endif
      answer.prepare(lane, scale_log2);
      while (has_new && own_new < NEW) {
        const u16* key = q + (i64)(token + own_new) * q_row +
                         (KV_HEADS * GROUP + kv_head) * HEAD_DIM;
        if (NEW > 1) turn.load(rotation(own_new), t);
        NewToken fresh;
        fresh.take(key, turn, k_weight, eps, cache, new_slot, lane);
        answer.begin_with(fresh, key + KV_HEADS * HEAD_DIM, own_new, lane, scale_log2);
        own_new += WARPS;
        if (NEW <= WARPS) break;
        if (own_new < NEW) new_slot = slots[token + own_new];
      }
    }
#else
    answer.prepare(lane, scale_log2);
#endif

    for (int i = 0; i < own; ++i) {
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      answer.take_step(ring + i % STAGES * STEP_VECTORS, (own_first + WARPS * i) * KEYS,
                       extent.first_key, stop, extent.first_of_window, kv_head, lane, scale_log2);
      __syncwarp();  // all have read what is written over now
      if (i + STAGES < own) copy(i + STAGES);
      end_step_of_copies();
    }
    wait_for_copies<0>();
    answer.add_up_totals();
    answer.leave((float*)ring, ROW_NUMBERS, bests + warp * QUERIES, totals + warp * QUERIES,
                 lane);
    __syncthreads();

    u16* its_out = out + (i64)token * out_row + (i64)kv_head * GROUP * out_head;
    const int at = ((2 * program + (done > 0)) * KV_HEADS + kv_head) * QUERIES;
    for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32) {
      const int number = 4 * quad;
      float best, total;
      const float4 sum = sum_of_parts(bests, totals, number, best, total);
      if (count == steps) {
        if (asked) store_answer(its_out, out_row, out_head, number, sum, total);
      } else {
        *(float4*)(parts.sums + (i64)at * HEAD_DIM + number) = sum;
        if (number % HEAD_DIM == 0) {
          parts.best[at + number / HEAD_DIM] = best;
          parts.totals[at + number / HEAD_DIM] = total;
        }
      }
    }
    if (count != steps) {
      const int start = program * share + done - tile;  // of the request, among all steps
      const int first_program = start / share;
      const int pieces = (start + steps - 1) / share - first_program + 1;
      int* counter = arrived + request * KV_HEADS + kv_head;
      __syncthreads();
      if (threadIdx.x == 0) {
        const bool is_last_piece = arrive(counter) == pieces - 1;
        if (is_last_piece) *counter = 0;
        *is_last_one = is_last_piece;
      }
      __syncthreads();
      if (*is_last_one && asked)
        merge_pieces(parts, first_program, pieces, start > first_program * share, kv_head, its_out,
                     out_row, out_head);
    }
    left -= count;
    done += count;
    tile = 0;
    ++request;
    if (left > 0) __syncthreads();  // all have read what is written over now
  }
}
#else
// ---- The kernel -------------------------------------------------------------------------------

// A request that lies in other ranges too: where it begins among all steps, and how many it has.
// `token` -1: nobody asks.
struct Open {
  int request, token, start, steps;
};

// Of a warp's pieces, one a lane: says that they are there; merges those that are complete. There
// are two at most, at the ends of the range, and they wait for each other's answer together.
__device__ __forceinline__ void finish(const Open& open, int num_open, const Parts& parts,
                                       int program, int share, int kv_head, u16* out, int out_row,
                                       int out_head, int lane) {
  const int its_first = open.start / share;
  const int its_pieces = (open.start + open.steps - 1) / share - its_first + 1;
  const int its_late = open.start > its_first * share;
  int* its_counter = parts.arrived + open.request * KV_HEADS + kv_head;
  // Of many pieces, neighbours meet first.
  const bool grouped = its_pieces > FAN;
  const int group_at = grouped ? (program - its_first) / FAN * FAN : 0;
  const int group_late = group_at ? 0 : its_late;
  const int size = grouped ? min(FAN, its_pieces - group_at) : its_pieces;
  int* met = grouped ? parts.groups_arrived + (2 * (its_first + group_at) + group_late) * KV_HEADS +
                           kv_head
                     : its_counter;
  __syncwarp();
  int before = -1;
  if (lane < num_open) before = arrive(met);
  __syncwarp();
  const bool complete = lane < num_open && before == size - 1;
  if (complete) *met = 0;
  for (int k = 0; k < num_open; ++k) {
    if (!__shfl_sync(ALL, (int)complete, k)) continue;
    const int first = __shfl_sync(ALL, its_first, k), late = __shfl_sync(ALL, its_late, k);
    const int pieces = __shfl_sync(ALL, its_pieces, k), token = __shfl_sync(ALL, open.token, k);
    u16* its_out = out + (i64)token * out_row + (i64)kv_head * GROUP * out_head;
    int stride = 1, parts_left = pieces;
    if (pieces > FAN) {
      const int at = __shfl_sync(ALL, group_at, k), at_late = __shfl_sync(ALL, group_late, k);
      merge(parts, first + at, 1, min(FAN, pieces - at), at_late, kv_head, nullptr, 0, lane);
      stride = FAN;
      parts_left = (pieces + FAN - 1) / FAN;
      const int request = __shfl_sync(ALL, open.request, k);
      if (!is_last(parts.arrived + request * KV_HEADS + kv_head, parts_left, lane)) continue;
    }
    if (token >= 0)
      merge(parts, first, stride, parts_left, late, kv_head, its_out, out_head, lane);
  }
}

// Grid: programs, KV_HEADS / WARPS. Shared memory: WARPS * STAGES * STEP_VECTORS times 16 bytes.
// FUSED: q is the packed product [T, (H + 2 K) * D] and q_head
// is HEAD_DIM.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
paged_decode(const u16* q, void* numbers, u16* out, const int* tables, const i64* table_rows,
             const int* seq_lens, const int* query_start, const i64* slots,
             const float* rotations, const u16* q_weight, const u16* k_weight,
             const int* records, float* part_sums, float* part_best, float* part_totals,
             int* arrived, int* groups_arrived, int num_requests, int table_stride, int q_row,
             int q_head, int out_row, int out_head, float scale_log2, float eps, int early,
             void* scales, int num_positions) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int program = blockIdx.x, kv_head = blockIdx.y * WARPS + warp;
#if DEPENDENT
  if (!early) wait_for_kernel_before();
#endif
  const int* record = records + program * RECORD;
  int request = record[0], tile = record[2], left = record[3], done = 0;
  const int share = record[4];
  if (left == 0) return;

  uint4* ring = shared_ring + warp * STAGES * STEP_VECTORS;
  const Batch batch = {tables, table_rows, seq_lens, query_start, table_stride, num_requests};
  const Parts parts = {part_sums, part_best, part_totals, arrived, groups_arrived};
  const Cache cache = cache_of(numbers, scales, kv_head, lane);

  Reader reader;
  reader.begin(batch, request, tile, left, lane);
  for (int stage = 0; stage < STAGES; ++stage) {
    reader.copy(batch, ring + stage * STEP_VECTORS, cache, lane);
    end_step_of_copies();
  }

  Open open = {0, -1, 0, 1};
  int num_open = 0;
  uint4* place = ring;
  int length = seq_lens[request];
  int token = query_start[request], after = query_start[request + 1];
#if DEPENDENT
  wait_for_kernel_before();
  let_next_kernel_begin();
#endif
  while (left > 0) {
    // Of the request after this one: here by the time it is asked for.
    const int coming = min(request + 1, num_requests - 1);
    const int next_length = seq_lens[coming], next_after = query_start[coming + 1];
    const bool asked = after > token;
    const Extent extent = extent_of(length, min(after - token, 1));
    const int steps = extent.stop - extent.first_step;
    const int count = min(left, steps - tile);
    const int last = extent.first_step + tile + count;

    Answer answer;
    answer.clear();
    const u16* its_q = q + (i64)token * q_row + (i64)kv_head * GROUP * q_head;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        answer.q[n][c] = make_uint4(0, 0, 0, 0);
        if (8 * n + g < GROUP && asked)
          answer.q[n][c] = load_vector(its_q + (i64)(8 * n + g) * q_head + 32 * c + 8 * t);
      }
#if FUSED
    if (length > 0 && asked) {
      Turn turn;
      turn.load(rotations + (i64)(length - 1) * 2 * HEAD_DIM, t);
      const bool has_new = last == extent.stop;
      const u16* key = q + (i64)token * q_row + (KV_HEADS * GROUP + kv_head) * HEAD_DIM;
      NewToken fresh;
      if (has_new) {
        const i64 slot = slots[token];
        fresh.take(key, turn, k_weight, eps, cache, slot, lane);
      }
      turn_all(answer.q, turn, q_weight, eps, t);
      answer.prepare(lane, scale_log2);
      if (has_new) answer.begin_with(fresh, key + KV_HEADS * HEAD_DIM, 0, lane, scale_log2);
    }
#else
    answer.prepare(lane, scale_log2);
#endif

    for (int step = extent.first_step + tile; step < last; ++step) {
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      answer.take_step(place, step * KEYS, extent.first_key, length - FUSED,
                       extent.first_of_window, kv_head, lane, scale_log2);
      __syncwarp();  // all have read what is written over now
      reader.copy(batch, place, cache, lane);
      end_step_of_copies();
      place += STEP_VECTORS;
      if (place == ring + STAGES * STEP_VECTORS) place = ring;
    }

    answer.add_up_totals();
    u16* its_out = out + (i64)token * out_row + (i64)kv_head * GROUP * out_head;
    if (count == steps) {
      if (asked) answer.store(its_out, out_head, lane);
    } else {
      const int at = ((2 * program + (done > 0)) * KV_HEADS + kv_head) * GROUP;
      answer.leave(parts.sums + (i64)at * HEAD_DIM, HEAD_DIM, parts.best + at, parts.totals + at,
                   lane);
      const int start = program * share + done - tile;  // of the request, among all steps
      if (lane == num_open) open = {request, asked ? token : -1, start, steps};
      ++num_open;
    }
    left -= count;
    done += count;
    tile = 0;
    ++request;
    length = next_length;
    token = after;
    after = next_after;
  }
  if (num_open)
    finish(open, num_open, parts, program, share, kv_head, out, out_row, out_head, lane);
}
#endif
