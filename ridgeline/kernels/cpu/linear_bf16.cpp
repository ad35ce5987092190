// Linear layers with AVX-512, VNNI and dot products of bfloat16.
#define BF16_DOT
#include "linear_ops512.h"
//
#include "linear_kernel.h"

LinearVariant linear_bf16() { return vector_variant(); }
