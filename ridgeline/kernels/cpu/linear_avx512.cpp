// Linear layers with AVX-512 and VNNI.
#include "linear_ops512.h"
//
#include "linear_kernel.h"

LinearVariant linear_avx512() { return vector_variant(); }
