#include "attention_variant.h"

const AttentionVariant* attention_avx2() { return &functions; }
