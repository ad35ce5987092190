#include "elementwise_variant.h"

const ElementwiseVariant* elementwise_avx512() { return &functions; }
