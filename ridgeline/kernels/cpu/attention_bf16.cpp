#include "attention_variant.h"

const AttentionVariant* attention_bf16() { return &functions; }
