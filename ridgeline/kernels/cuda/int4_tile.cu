// What `tile_linear.cu`, which includes this, does where W has 4 bits: its records come as they are
// into the ring, and become the left operand of the products in registers.

#include "int4_record.cu"

// "%0,%1,...": sums, four registers of the left operand, the right one, and "keep".
#if COLUMNS == 16
#define PACKED_OPERANDS "{" L8 "}, {%8,%9,%10,%11}, %12, p"
#define PACKED_KEEP "%13"
#elif COLUMNS == 32
#define PACKED_OPERANDS "{" L16 "}, {%16,%17,%18,%19}, %20, p"
#define PACKED_KEEP "%21"
#elif COLUMNS == 64
#define PACKED_OPERANDS "{" L32 "}, {%32,%33,%34,%35}, %36, p"
#define PACKED_KEEP "%37"
#elif COLUMNS == 96
#define PACKED_OPERANDS "{" L48 "}, {%48,%49,%50,%51}, %52, p"
#define PACKED_KEEP "%53"
#elif COLUMNS == 128
#define PACKED_OPERANDS "{" L64 "}, {%64,%65,%66,%67}, %68, p"
#define PACKED_KEEP "%69"
#elif COLUMNS == 192
#define PACKED_OPERANDS "{" L96 "}, {%96,%97,%98,%99}, %100, p"
#define PACKED_KEEP "%101"
#elif COLUMNS == 256
#define PACKED_OPERANDS "{" L128 "}, {%128,%129,%130,%131}, %132, p"
#define PACKED_KEEP "%133"
#endif
#if ELEMENT == 0
#define PACKED_SHAPE "m64n" TEXT(COLUMNS) "k16.f32.bf16.bf16 " PACKED_OPERANDS ", 1, 1, 0;"
#else
#define PACKED_SHAPE "m64n" TEXT(COLUMNS) "k16.f32.f16.f16 " PACKED_OPERANDS ", 1, 1, 0;"
#endif

#define HALVES (GATED + 1)  // gate and up
#define RECORDS_EACH (ROWS / 16 / HALVES)

// d = a @ b.T, on top of d if `keep`; b as `described`, 32 bytes of each row.
__device__ __forceinline__ void multiply_packed(float (&d)[SUMS], const u32 (&a)[4], u64 b,
                                                u32 keep) {
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, " PACKED_KEEP ", 0;\n"
               "wgmma.mma_async.sync.aligned." PACKED_SHAPE "}"
               : RESULTS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)
               : "memory");
}

#if GATED
#define RECORDS_AT "[%1, {%3, %4, %5, %3}]"
#define RECORD_AXES "4d"
#else
#define RECORDS_AT "[%1, {%3, %4, %5}]"
#define RECORD_AXES "3d"
#endif

// The records of one step of a tile, one behind the other; gated: those of gate, then those of up.
// (One copy each would be bound by the thread that sends them.)
__device__ __forceinline__ void send_records(u32 to, const Map* map, u32 barrier, int block,
                                             int step, u64 policy) {
  expect(barrier, ROWS / 16 * RECORD);
  asm volatile("cp.async.bulk.tensor." RECORD_AXES
               ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               RECORDS_AT ", [%2], %6;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(0), "r"(step), "r"(block * RECORDS_EACH), "l"(policy)
               : "memory");
}

// The codes of a lane for a band of 64 rows: those of its upper row and of its lower one, which are
// 8 rows apart; gated: of gate and of up.
struct Lane {
  const char *upper, *lower;
  int upper_row, lower_row;
  uint4 upper_codes, lower_codes;

  Lane() = default;

  __device__ __forceinline__ Lane(const char* stage, int band, int warp, int lane) {
    const int g = lane / 4;
#if GATED
    const int record = band * 2 + warp % 4 / 2;
    upper = stage + record * RECORD;
    lower = upper + RECORDS_EACH * RECORD;
    upper_row = lower_row = warp % 2 * 8 + g;
#else
    upper = lower = stage + (band * 4 + warp % 4) * RECORD;
    upper_row = g;
    lower_row = 8 + g;
#endif
    upper_codes = *(const uint4*)(upper + upper_row / 8 * HALF_BYTES + lane * 16);
    lower_codes = *(const uint4*)(lower + lower_row / 8 * HALF_BYTES + lane * 16);
  }

  // The left operand of 4 products: columns 64 * block and on.
  __device__ __forceinline__ void operands(u32 (&a)[4][4], int block, u32 opens) const {
    const u32 words[2][2] = {{block ? upper_codes.z : upper_codes.x,
                              block ? upper_codes.w : upper_codes.y},
                             {block ? lower_codes.z : lower_codes.x,
                              block ? lower_codes.w : lower_codes.y}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int group = (block * 64 + i * 16) / GROUP;
      const u32 upper_zero = raised_zero_of(upper, group, upper_row);
      const u32 lower_zero = raised_zero_of(lower, group, lower_row);
      const Scale upper_scale = scale_for(upper, group, upper_row);
      const Scale lower_scale = scale_for(lower, group, lower_row);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int shift = i % 2 * 8 + p * 4;
        const u32 above = minus(raised(words[0][i / 2] >> shift, opens), upper_zero);
        const u32 below = minus(raised(words[1][i / 2] >> shift, opens), lower_zero);
        a[i][2 * p] = scaled(above, upper_scale);
        a[i][2 * p + 1] = scaled(below, lower_scale);
      }
    }
  }
};

// What a product reads is in its registers before the fence in front of it.
__device__ __forceinline__ void settle(u32 (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
