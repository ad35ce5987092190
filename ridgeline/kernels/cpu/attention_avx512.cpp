#include "attention_variant.h"

const AttentionVariant* attention_avx512() { return &functions; }
