// How are numbers passed and rounded? The dtypes of the C interface and scalar conversions.
#pragma once

#include <cstdint>
#include <cstring>

enum RlDtype : int { RL_F32 = 0, RL_BF16 = 1, RL_I8 = 2, RL_I4 = 3, RL_E4M3 = 4, RL_F16 = 5 };

namespace {

using bf16 = uint16_t;

[[maybe_unused]] inline float to_float(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// To nearest, ties to even; NaN stays NaN.
[[maybe_unused]] inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

[[maybe_unused]] inline float load_number(const void* base, int64_t index, int dtype) {
  return dtype == RL_BF16 ? to_float(static_cast<const bf16*>(base)[index])
                          : static_cast<const float*>(base)[index];
}

}  // namespace
