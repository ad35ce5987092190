// W of 4 bits as numbers of the dtype of x, for the library to multiply by: one record a warp.
//
// Compiled with what int4_record.cu says.

#include "int4_record.cu"

extern "C" __global__ void __launch_bounds__(256)
    int4_unpack(const char* __restrict__ w, u16* y, int records, int total, u64 y_stride) {
  const int at = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (at >= total) return;
  const char* record = w + (u64)at * RECORD;
  const int row = lane / 4, p = lane % 4;
  const u32 opens = opens_of_launch();
  u16* to = y + (u64)(at / records * 16) * y_stride + at % records * 128 + p * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // All of a row: what four lanes of a product have. This one makes 8 of each 32 columns.
    u32 words[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 of = __ldg((const uint4*)(record + half * HALF_BYTES + row * 64) + i);
      words[i][0] = of.x;
      words[i][1] = of.y;
      words[i][2] = of.z;
      words[i][3] = of.w;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int group = q * 32 / GROUP;
      const u32 zero = raised_zero_of(record, group, half * 8 + row);
      const Scale scale = scale_for(record, group, half * 8 + row);
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = scaled(minus(raised(words[i][q] >> (4 * p), opens), zero), scale);
      *(uint4*)(to + (half * 8 + row) * y_stride + q * 32) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
