#include "elementwise_variant.h"

const ElementwiseVariant* elementwise_avx2() { return &functions; }
