// Dot products with those of bfloat16.
#define BF16_DOT
#define PEAK peak_bf16
#include "peak_kernel.h"
