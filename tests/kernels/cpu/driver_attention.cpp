// Attention and the write to its cache, in memory of exactly the size that they need, against sums
// in double: called by driver.cpp at each level of instructions.
#include "driver_attention.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "attention.h"
#include "elementwise.h"

RL_API int rl_attention(const AttentionArgs*);
RL_API int rl_rotate(const RotateArgs*);

namespace {

// Queries with 16 bits instead of 24, and sums in float32.
constexpr double LIMIT_OF_FLOATS = 1e-3, LIMIT_OF_PAIRS = 4e-2;

struct Paged {
  int64_t blocks, block_size, kv_heads, head_dim;
  int kv_dtype;
  std::unique_ptr<char[]> numbers;
  std::unique_ptr<uint16_t[]> scales;

  // Of a head: places of `width` bytes, and scales with their lows.
  int64_t places() const { return kv_dtype == RL_I4 ? head_dim / 2 : head_dim; }
  int64_t scales_each() const { return kv_dtype == RL_I4 ? 2 : kv_dtype == RL_I8 ? 1 : 0; }
  int64_t slot_numbers() const { return 2 * kv_heads * places(); }
  int64_t slot_scales() const { return 2 * kv_heads * scales_each(); }
  int64_t width() const { return kv_dtype == RL_F32 ? 4 : kv_dtype == RL_BF16 ? 2 : 1; }
  char* side(int which) const { return numbers.get() + which * kv_heads * places() * width(); }
  uint16_t* scales_of(int which) const {
    return scales == nullptr ? nullptr : scales.get() + which * kv_heads * scales_each();
  }
  uint16_t* lows_of(int which) const { return kv_dtype == RL_I4 ? scales_of(which) + 1 : nullptr; }
};

float from_half(uint16_t half) {
  int exponent = (half >> 10) & 31, bits = half & 1023;
  float value = exponent ? std::ldexp(1024.0f + bits, exponent - 25) : std::ldexp(bits, -24);
  return half & 0x8000 ? -value : value;
}

float from_e4m3(uint8_t code) {
  int exponent = (code >> 3) & 15, bits = code & 7;
  float value = exponent ? std::ldexp(8.0f + bits, exponent - 10) : std::ldexp(bits, -9);
  return code & 0x80 ? -value : value;
}

// Of keys of 4 bits a number of the turned head.
double number(const Paged& p, int which, int64_t slot, int64_t head, int64_t d) {
  int64_t at = slot * p.slot_numbers() + head * p.places() + d % p.places();
  const uint16_t* scale = p.scales_of(which) + slot * p.slot_scales() + head * p.scales_each();
  uint8_t byte = reinterpret_cast<const uint8_t*>(p.side(which))[p.width() == 1 ? at : 0];
  switch (p.kv_dtype) {
    case RL_I8:
      return double(int8_t(byte)) * from_half(*scale);
    case RL_I4:
      return double(d < p.places() ? byte & 15 : byte >> 4) * from_half(scale[0]) +
             from_half(scale[1]);
    case RL_E4M3:
      return from_e4m3(byte);
    default:
      return load_number(p.side(which), at, p.kv_dtype);
  }
}

// A head times Hadamard's matrix.
std::vector<double> turned(const std::vector<double>& x) {
  std::vector<double> y(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < x.size(); ++j)
      y[i] += (__builtin_parityll(i & j) ? -x[j] : x[j]) / std::sqrt(double(x.size()));
  return y;
}

std::vector<double> head_at(const void* base, int64_t at, int64_t size, int dtype, bool is_turned) {
  std::vector<double> x;
  for (int64_t d = 0; d < size; ++d) x.push_back(load_number(base, at + d, dtype));
  return is_turned ? turned(x) : x;
}

Paged make(int64_t blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim, int kv_dtype) {
  Paged p{blocks, block_size, kv_heads, head_dim, kv_dtype, nullptr, nullptr};
  p.numbers.reset(new char[size_t(blocks * block_size * p.slot_numbers() * p.width())]());
  if (p.scales_each())
    p.scales.reset(new uint16_t[size_t(blocks * block_size * p.slot_scales())]());
  return p;
}

void put(void* to, int64_t index, float value, int dtype) {
  if (dtype == RL_F32) {
    static_cast<float*>(to)[index] = value;
  } else {
    static_cast<bf16*>(to)[index] = to_bf16(value);
  }
}

// No number is left of a token.
void spoil(Paged& p, int64_t slot) {
  for (int64_t i = 0; i < p.slot_scales(); ++i) p.scales[size_t(slot * p.slot_scales() + i)] = 0x7e00;
  for (int64_t i = 0; i < p.slot_numbers(); ++i) {
    int64_t at = slot * p.slot_numbers() + i;
    if (p.kv_dtype == RL_E4M3) p.numbers[size_t(at)] = 0x7f;
    if (p.width() > 1) put(p.numbers.get(), at, NAN, p.kv_dtype);
  }
}

}  // namespace

int check_attention(std::mt19937& noise) {
  auto below = [&noise](int64_t most) { return int64_t(noise() % unsigned(most)); };
  std::normal_distribution<float> normal;
  const int64_t sizes[] = {2, 10, 46, 48, 64, 66, 128, 130, 256};
  int dtype = noise() & 1 ? RL_F32 : RL_BF16;
  const int kv_dtypes[] = {dtype, RL_I8, RL_I4, RL_E4M3};
  int kv_dtype = kv_dtypes[below(4)];
  bool is_turned = kv_dtype == RL_I4;
  int64_t kv_heads = 1 + below(3), group = 1 + below(7), heads = kv_heads * group;
  int64_t size = sizes[below(9)], block_size = 1 + below(16), requests = 1 + below(3);
  if (is_turned) size = 16 << below(5);
  int64_t window = noise() & 1 ? 0 : 1 + below(40), width = dtype == RL_F32 ? 4 : 2;

  std::vector<int32_t> lens, starts{0};
  int64_t longest = 0;
  for (int64_t b = 0; b < requests; ++b) {
    int64_t fresh = noise() & 1 ? 1 : 1 + below(30);
    int64_t before = below(noise() & 3 ? 90 : 600);  // a part of a token's keys has 128 and more
    lens.push_back(int32_t(before + fresh));
    starts.push_back(int32_t(starts.back() + fresh));
    longest = longest < before + fresh ? before + fresh : longest;
  }
  int64_t columns = (longest + block_size - 1) / block_size, tokens = starts.back();
  Paged kv = make(requests * columns, block_size, kv_heads, size, kv_dtype);
  std::vector<int32_t> tables;
  for (int64_t i = 0; i < requests * columns; ++i)
    tables.push_back(int32_t(requests * columns - 1 - i));

  // All keys and values go through the kernel that writes them, without a rotation.
  int64_t stride = (heads + 2 * kv_heads) * size;
  std::vector<float> table(size_t(2 * size), 0.0f);
  for (int64_t d = 0; d < size; ++d) table[size_t(d)] = 1.0f;
  int64_t slots_all = kv.blocks * block_size;
  std::unique_ptr<char[]> qkv(new char[size_t(slots_all * stride * width)]);
  for (int64_t i = 0; i < slots_all * stride; ++i) put(qkv.get(), i, normal(noise), dtype);
  std::vector<int64_t> positions(size_t(slots_all), 0), slots;
  for (int64_t i = 0; i < slots_all; ++i) slots.push_back(i);
  RotateArgs turn{qkv.get(), table.data(), positions.data(), slots.data(), kv.side(0), kv.side(1),
                nullptr, nullptr, kv.scales_of(0), kv.scales_of(1), kv.lows_of(0), kv.lows_of(1),
                slots_all, stride, heads, kv_heads, size, block_size,
                block_size * kv.slot_numbers(), kv.slot_numbers(), kv.places(), dtype,
                block_size * kv.slot_scales(), kv.slot_scales(), kv.scales_each(), kv_dtype, 0.0};
  int failures = rl_rotate(&turn) != 0;
  for (int64_t slot = 0; slot < slots_all; ++slot) {
    for (int64_t head = 0; head < 2 * kv_heads; ++head) {
      int64_t at = slot * stride + (heads + head) * size;
      std::vector<double> wanted =
          head_at(qkv.get(), at, size, dtype, is_turned && head < kv_heads);
      for (int64_t d = 0; d < size; ++d) {
        double found = number(kv, head >= kv_heads, slot, head % kv_heads, d);
        // no draw is as large as 7
        double step = kv_dtype == RL_I8 ? 7.0 / 250 : is_turned ? 14.0 / 29 : 0.0;
        if (kv_dtype == RL_E4M3) step = std::fabs(wanted[size_t(d)]) / 16 + 1e-3;
        failures += !(std::fabs(found - wanted[size_t(d)]) <= step + 1e-6);
      }
    }
  }

  // Some of a request's last tokens may be drafts without a block of their own.
  std::vector<int32_t> sound = lens;
  for (int64_t b = 0; b < requests; ++b) {
    int32_t fresh = starts[size_t(b) + 1] - starts[size_t(b)], draft_tokens = int32_t(below(fresh));
    sound[size_t(b)] -= draft_tokens;
    for (int64_t key = sound[size_t(b)]; key < lens[size_t(b)]; ++key)
      spoil(kv, tables[size_t(b * columns + key / block_size)] * block_size + key % block_size);
  }

  std::unique_ptr<char[]> q(new char[size_t(tokens * heads * size * width)]);
  std::unique_ptr<char[]> out(new char[size_t(tokens * heads * size * width)]());
  for (int64_t i = 0; i < tokens * heads * size; ++i) put(q.get(), i, normal(noise), dtype);
  double scale = 1.0 / std::sqrt(double(size));
  AttentionArgs args{q.get(), out.get(), kv.side(0), kv.side(1), tables.data(), nullptr,
                     lens.data(), starts.data(), kv.scales_of(0), kv.scales_of(1), kv.lows_of(0),
                     kv.lows_of(1), requests, columns, columns, heads * size, heads * size,
                     block_size * kv.slot_numbers(), kv.slot_numbers(), kv.places(), block_size,
                     heads, kv_heads, size, window, dtype, kv_dtype,
                     block_size * kv.slot_scales(), kv.slot_scales(), kv.scales_each(), scale};
  failures += rl_attention(&args) != 0;
  double limit = dtype == RL_F32 ? LIMIT_OF_FLOATS : LIMIT_OF_PAIRS, worst = 0;
  for (int64_t b = 0; b < requests; ++b) {
    for (int64_t t = starts[size_t(b)]; t < starts[size_t(b) + 1]; ++t) {
      int64_t last = lens[size_t(b)] - starts[size_t(b) + 1] + t;
      int64_t first = window && last - window + 1 > 0 ? last - window + 1 : 0;
      for (int64_t h = 0; h < heads; ++h) {
        std::vector<double> sums(size_t(size), 0.0);
        std::vector<double> asked =
            head_at(q.get(), (t * heads + h) * size, size, dtype, is_turned);
        double weight = 0;
        for (int64_t key = first; key <= last; ++key) {
          int64_t slot = tables[size_t(b * columns + key / block_size)] * block_size +
                         key % block_size;
          double dot = 0;
          for (int64_t d = 0; d < size; ++d)
            dot += asked[size_t(d)] * number(kv, 0, slot, h / group, d);
          double p = std::exp(dot * scale);
          weight += p;
          for (int64_t d = 0; d < size; ++d) sums[size_t(d)] += p * number(kv, 1, slot, h / group, d);
        }
        for (int64_t d = 0; d < size; ++d) {
          double found = load_number(out.get(), (t * heads + h) * size + d, dtype);
          if (last >= sound[size_t(b)]) {
            failures += found == found;
            continue;
          }
          double apart = std::fabs(found - sums[size_t(d)] / weight);
          worst = apart > worst || apart != apart ? apart : worst;
        }
      }
    }
  }
  if (failures || !(worst <= limit)) {
    std::printf("attention: dtype %d cache %d heads %d of %d size %d: off by %g, %d wrong\n", dtype,
                kv_dtype, int(heads), int(kv_heads), int(size), worst, failures);
    return 1;
  }
  return 0;
}
