// Weights of 4 bits as our kernels read them. Included by those; nothing to launch here.
//
// A record is 16 rows of W times 128 columns: 1,024 bytes of codes, then the scales, 16 rows of the
// first group of columns, 16 of the next, and so on, and then, if there are any, the zero points in
// the same order, a byte each. Records of the same rows follow one another along K. Codes stand as
// tensor cores want them: bytes 512 h + 16 lane .. + 15 are what a lane of a warp multiplies of row
// 8 h + g (g = lane / 4, t = lane % 4). Their word q has columns 32 q .. 32 q + 31: half byte
// p + 4 j is column 32 q + 8 p + 2 t + j, so that a shift by 4 p and a mask give two neighbours.
//
// Compiled with: ELEMENT (of x and so of the product) and SCALE: 0 bfloat16, 1 float16, SCALE 2
// float32; GROUP 32, 64 or 128; ZERO: there are zero points, else all are 8.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define HALF_BYTES 512
#define GROUPS (128 / GROUP)  // of columns, in a record
#define SCALE_BYTES (SCALE == 2 ? 4 : 2)
#define SCALES_AT 1024
#define ZEROS_AT (SCALES_AT + GROUPS * 16 * SCALE_BYTES)
#define RECORD (ZEROS_AT + GROUPS * 16 * ZERO)

// A code in the last bits of a pair of these is 128 + code in bfloat16, 1,024 + code in float16.
#if ELEMENT == 0
#define OPENS 0x43004300u
#define OPENS_AT 128.0f
#else
#define OPENS 0x64006400u
#define OPENS_AT 1024.0f
#endif

#ifdef __CUDACC__  // a test runs the rest on a CPU, with its own versions of these

__device__ __forceinline__ u32 minus(u32 x, u32 y) {
  u32 both;
#if ELEMENT == 0
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
#else
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
#endif
  return both;
}

// OPENS from a register, told from what is 1: as a constant it would cost an instruction at each use.
__device__ __forceinline__ u32 opens_of_launch() {
  u32 one;
  asm("mov.u32 %0, %%nctaid.z;" : "=r"(one));
  return OPENS * one;
}

// Each product rounded once.
__device__ __forceinline__ u32 times(u32 x, u32 y) {
  u32 both;
#if ELEMENT == 0
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
#endif
  return both;
}

__device__ __forceinline__ float number_of_half(u16 bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}

__device__ __forceinline__ float number_of_bits(u32 bits) { return __uint_as_float(bits); }

// Two numbers of the element.
__device__ __forceinline__ u32 pair_of(float first, float second) {
  u32 both;
#if ELEMENT == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
  return both;
}

#endif

__device__ __forceinline__ float first_of(u32 pair) {
#if ELEMENT == 0
  return number_of_bits(pair << 16);
#else
  return number_of_half((u16)pair);
#endif
}

__device__ __forceinline__ float second_of(u32 pair) {
#if ELEMENT == 0
  return number_of_bits(pair & 0xffff0000u);
#else
  return number_of_half((u16)(pair >> 16));
#endif
}

// Two neighbours of a word that was shifted by 4 p: OPENS_AT + code.
__device__ __forceinline__ u32 raised(u32 shifted, u32 opens) {
  return (shifted & 0x000f000fu) | opens;
}

// Of a row of a group in a record.
__device__ __forceinline__ u32 zero_of(const char* record, int group, int row) {
#if ZERO
  return *(const unsigned char*)(record + ZEROS_AT + group * 16 + row);
#else
  return 8;
#endif
}

// Twice OPENS_AT + zero: what has to be taken from a raised pair.
__device__ __forceinline__ u32 raised_zero_of(const char* record, int group, int row) {
  const u32 zero = zero_of(record, group, row);
  return OPENS | zero | zero << 16;
}

__device__ __forceinline__ float scale_of(const char* record, int group, int row) {
  const char* at = record + SCALES_AT + (group * 16 + row) * SCALE_BYTES;
#if SCALE == 0
  return number_of_bits((u32)(*(const u16*)at) << 16);
#elif SCALE == 1
  return number_of_half(*(const u16*)at);
#else
  return *(const float*)at;
#endif
}

// A scale as `scaled` takes it: twice, where the product of a pair is rounded but once.
#if SCALE == ELEMENT
typedef u32 Scale;
__device__ __forceinline__ Scale scale_for(const char* record, int group, int row) {
  const u32 bits = *(const u16*)(record + SCALES_AT + (group * 16 + row) * 2);
  return bits | bits << 16;
}

// (code - zero) * scale, rounded once to the element.
__device__ __forceinline__ u32 scaled(u32 numbers, Scale scale) { return times(numbers, scale); }
#else
typedef float Scale;
__device__ __forceinline__ Scale scale_for(const char* record, int group, int row) {
  return scale_of(record, group, row);
}

__device__ __forceinline__ u32 scaled(u32 numbers, Scale scale) {
  return pair_of(first_of(numbers) * scale, second_of(numbers) * scale);
}
#endif
