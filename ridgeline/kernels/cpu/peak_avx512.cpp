// Dot products without those of bfloat16.
#define PEAK peak_avx512
#include "peak_kernel.h"
