// How is attention computed by one thread? With a running maximum, sums in float32, keys and values
// read from their blocks. Included by one file for each variant; see elementwise_wide.h.
#include "attention_many.h"

namespace {

void few(const AttentionArgs& a, const AttentionItem& item, float* partials, float* scratch) {
  bool is_float = a.dtype == RL_F32;
  switch (a.kv_dtype) {
    case RL_I8:
      return is_float ? few_tokens<float, I8>(a, item, partials, scratch)
                      : few_tokens<B16, I8>(a, item, partials, scratch);
    case RL_I4:
      return is_float ? few_tokens<float, I4>(a, item, partials, scratch)
                      : few_tokens<B16, I4>(a, item, partials, scratch);
    case RL_E4M3:
      return is_float ? few_tokens<float, E4m3>(a, item, partials, scratch)
                      : few_tokens<B16, E4m3>(a, item, partials, scratch);
    default:
      return is_float ? few_tokens<float, float>(a, item, partials, scratch)
                      : few_tokens<B16, B16>(a, item, partials, scratch);
  }
}

void merge(const AttentionArgs& a, int64_t token, const float* partials, int64_t count) {
  if (a.dtype == RL_F32) return merge_parts<float>(a, token, partials, count);
  merge_parts<B16>(a, token, partials, count);
}

template <class C>
void many_of(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
#if defined(__AVX512BF16__)
  if (a.head_dim % 2 == 0) return some_tokens<true, B16, C>(a, item, scratch);
#endif
  some_tokens<false, B16, C>(a, item, scratch);
}

void many(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  bool is_float = a.dtype == RL_F32;
  switch (a.kv_dtype) {
    case RL_I8:
      return is_float ? some_tokens<false, float, I8>(a, item, scratch)
                      : many_of<I8>(a, item, scratch);
    case RL_I4:
      return is_float ? some_tokens<false, float, I4>(a, item, scratch)
                      : many_of<I4>(a, item, scratch);
    case RL_E4M3:
      return is_float ? some_tokens<false, float, E4m3>(a, item, scratch)
                      : many_of<E4m3>(a, item, scratch);
    default:
      return is_float ? some_tokens<false, float, float>(a, item, scratch)
                      : many_of<B16>(a, item, scratch);
  }
}

constexpr AttentionVariant functions = {scratch_floats, few, merge, many};

}  // namespace
