// Do the native kernels stay within their memory, and are their numbers right, at every level that
// this processor has? Built with sanitizers and with tiles in plain code by tools/sanitize_native.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <memory>
#include <random>
#include <vector>

#include "driver_attention.h"
#include "driver_verified.h"
#include "driver_speculation.h"
#include "isa.h"
#include "linear.h"

namespace {

int failures = 0;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Of exactly so many bytes (rounded up to a line), so that one too many is noticed.
std::unique_ptr<char, Free> lines_of(int64_t bytes) {
  return std::unique_ptr<char, Free>(
      static_cast<char*>(std::aligned_alloc(64, size_t(up(bytes < 1 ? 1 : bytes, 64)))));
}

struct Case {
  int format, group, scale_dtype;
  bool zeros;
  int64_t rows, outputs, inputs;
  bool bias, residual, gated, x_bf16, y_bf16;
};

// Weights are rounded by rl_pack; else codes are given.
bool rounds(const Case& c) {
  if (c.format == RL_W_INT8) return c.scale_dtype == RL_S_F32;
  return c.format <= RL_W_INT4 || (c.format == RL_W_GROUPS4 && c.zeros && c.scale_dtype == RL_S_BF16);
}

// Any codes, zero points and scales between 1 / 16 and 1 / 8.
void give(const Case& c, char* codes, char* scales, int64_t num_scales, uint8_t* zeros,
          int64_t num_zeros, std::mt19937& noise) {
  int64_t stride = has_bytes(c.format) ? c.inputs : (c.inputs + 1) / 2;
  std::vector<uint8_t> given(size_t(c.outputs * stride));
  for (uint8_t& v : given) v = uint8_t(noise());
  RlPackCodes pack{given.data(), codes, c.outputs, c.inputs, stride, c.format, 0};
  if (rl_pack_codes(&pack) != 0) ++failures;
  for (int64_t i = 0; i < num_scales; ++i) {
    uint32_t fraction = uint32_t(noise()) & 0x7f;
    uint32_t wide = 0x3d800000 | fraction << 16;
    uint16_t half = uint16_t(c.scale_dtype == RL_S_BF16 ? wide >> 16 : 0x2c00 | fraction << 3);
    if (c.scale_dtype == RL_S_F32)
      std::memcpy(scales + 4 * i, &wide, 4);
    else
      std::memcpy(scales + 2 * i, &half, 2);
  }
  for (int64_t i = 0; zeros && i < num_zeros; ++i) zeros[i] = uint8_t(noise() & 15);
}

double silu(double x) { return x / (1 + std::exp(-x)); }

void run(const Case& c, std::mt19937& noise) {
  std::normal_distribution<float> normal;
  std::vector<float> w(size_t(c.outputs * c.inputs)), x(size_t(c.rows * c.inputs));
  for (float& v : w) v = to_float(to_bf16(normal(noise)));
  for (float& v : x) v = to_float(to_bf16(normal(noise)));
  int64_t panels = up(c.outputs, PANEL) / PANEL, step = line_inputs(c.format);
  auto codes = lines_of(panels * up(c.inputs, step) / step * LINE);
  int64_t groups = c.group ? (c.inputs + c.group - 1) / c.group : 0;
  int64_t beside = panels * groups * PANEL, size = c.format == RL_W_INT8 ? c.outputs : beside;
  auto scales = lines_of(size * scale_bytes(c.scale_dtype));
  auto zeros = lines_of(beside);
  auto* zeros_at = c.zeros ? reinterpret_cast<uint8_t*>(zeros.get()) : nullptr;
  if (rounds(c)) {
    RlPack pack{w.data(), codes.get(), scales.get(), zeros_at,  c.outputs, c.inputs,
                c.inputs, RL_F32,      c.format,     c.group,   0};
    if (rl_pack(&pack) != 0) {
      std::printf("pack failed\n");
      ++failures;
      return;
    }
  } else {
    give(c, codes.get(), scales.get(), size, zeros_at, beside, noise);
  }
  RlMatrix m{codes.get(), scales.get(), zeros_at,      c.outputs, c.inputs,
             c.format,    c.group,      c.scale_dtype, !rounds(c)};
  std::vector<float> read(w.size());
  RlGather gather{m, nullptr, read.data(), c.outputs, c.inputs, RL_F32, 0};
  rl_gather(&gather);

  int64_t width = c.gated ? c.outputs / 2 : c.outputs;
  std::vector<float> bias(size_t(c.outputs)), residual(size_t(c.rows * width));
  for (float& v : bias) v = normal(noise);
  for (float& v : residual) v = normal(noise);
  std::vector<bf16> x16(x.size()), y16(residual.size());
  for (size_t i = 0; i < x.size(); ++i) x16[i] = to_bf16(x[i]);
  std::vector<float> y(residual.size());
  RlLinear call{};
  call.matrix = m;
  call.x = c.x_bf16 ? static_cast<void*>(x16.data()) : x.data();
  call.y = c.y_bf16 ? static_cast<void*>(y16.data()) : y.data();
  call.bias = c.bias ? bias.data() : nullptr;
  call.residual = c.residual ? residual.data() : nullptr;
  call.rows = c.rows;
  call.x_stride = c.inputs;
  call.y_stride = call.residual_stride = width;
  call.x_dtype = c.x_bf16;
  call.y_dtype = c.y_bf16;
  call.gated = c.gated;
  int result = rl_linear(&call);

  double worst = 0, allowed = 0;
  for (int64_t i = 0; i < c.rows; ++i) {
    double x_size = 0, most_w = 0;
    for (int64_t k = 0; k < c.inputs; ++k) x_size += double(x[i * c.inputs + k]) * x[i * c.inputs + k];
    std::vector<double> dots(size_t(c.outputs));
    for (int64_t n = 0; n < c.outputs; ++n) {
      double dot = c.bias ? bias[n] : 0, w_size = 0;
      for (int64_t k = 0; k < c.inputs; ++k) {
        double v = read[n * c.inputs + k];
        dot += x[i * c.inputs + k] * v;
        w_size += v * v;
      }
      dots[n] = dot;
      most_w = std::fmax(most_w, w_size);
    }
    double size = std::sqrt(x_size * most_w);
    for (int64_t n = 0; n < width; ++n) {
      double wanted = c.gated ? silu(dots[n]) * dots[n + width] : dots[n];
      double slack = (c.format == RL_W_BF16 ? 1e-5 : 0.025) * size;
      if (c.gated) slack = slack * (std::fabs(dots[n]) + std::fabs(dots[n + width]) + slack) * 1.5;
      if (c.residual) wanted += residual[i * width + n];
      double got = c.y_bf16 ? to_float(y16[i * width + n]) : y[i * width + n];
      slack += 1e-5 + (c.y_bf16 ? std::fabs(wanted) / 128 : 0);
      if (!(std::fabs(got - wanted) <= slack)) {
        worst = std::fmax(worst, std::fabs(got - wanted));
        allowed = slack;
        result = result ? result : -1;
      }
    }
  }
  if (result != 0) {
    ++failures;
    std::printf("level %d format %d group %d scales %d zeros %d M %d N %d K %d gated %d: result %d off %g allowed %g\n",
                isa_level(), c.format, c.group, c.scale_dtype, int(c.zeros), int(c.rows), int(c.outputs), int(c.inputs),
                int(c.gated), result, worst, allowed);
  }
}

void check_pool() {
  for (int threads : {1, 2, 5}) {
    pool_set_threads(threads);
    for (int tasks : {0, 1, 3, 1000}) {
      struct Seen {
        std::vector<std::atomic<int>> times;
        std::atomic<int> wrong{0};
        int threads;
      } seen{std::vector<std::atomic<int>>(size_t(tasks)), {}, threads};
      for (int again = 0; again < 200; ++again)
        pool_run(
            tasks,
            [](void* raw, int task, int thread) {
              auto* s = static_cast<Seen*>(raw);
              if (thread < 0 || thread >= s->threads) s->wrong++;
              s->times[size_t(task)]++;
              if (task == 1) {
                int inner = 0;
                pool_run(3, [](void* count, int, int) { ++*static_cast<int*>(count); }, &inner);
                if (inner != 3) s->wrong++;
              }
            },
            &seen);
      for (auto& times : seen.times) seen.wrong += times != 200;
      if (seen.wrong) {
        ++failures;
        std::printf("pool: threads %d tasks %d wrong %d\n", threads, tasks, int(seen.wrong));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  unsigned seed = argc > 1 ? unsigned(std::atoi(argv[1])) : 1;
  int cases = argc > 2 ? std::atoi(argv[2]) : 60;
  std::printf("seed %u\n", seed);
  check_pool();
  const int64_t many_rows[] = {1, 2, 3, 4, 5, 7, 9, 12, 13, 16, 17, 24, 25, 31, 33, 40, 49, 70};
  const int64_t many_outputs[] = {1, 15, 16, 17, 32, 33, 48, 64, 96, 160};
  const int64_t many_inputs[] = {1, 2, 7, 8, 31, 32, 63, 64, 65, 100, 130, 200, 288, 513, 700};
  const int groups[] = {8, 32, 64, 128, 96, 512};
  for (int level = ISA_AVX2; level <= isa_best(); ++level) {
    isa_set(level);
    std::mt19937 noise(seed);
    auto one_of = [&noise](const auto& list) { return list[noise() % (sizeof(list) / sizeof(*list))]; };
    for (int i = 0; i < cases; ++i) {
      pool_set_threads(1 + int(noise() % 3));
      failures += check_attention(noise);
      failures += check_checked(noise);
      failures += check_speculation(noise);
      for (int format : {RL_W_BF16, RL_W_INT8, RL_W_INT4, RL_W_GROUPS4, RL_W_GROUPS8}) {
        Case c{};
        c.format = format;
        c.group = has_groups(format) ? one_of(groups) : 0;
        c.scale_dtype = format == RL_W_INT4 ? int(RL_S_BF16) : int(noise() % 3);
        c.zeros = format == RL_W_GROUPS4 && (noise() & 1);
        c.rows = one_of(many_rows);
        c.outputs = one_of(many_outputs);
        c.inputs = one_of(many_inputs);
        c.bias = noise() & 1;
        c.residual = noise() & 1;
        c.gated = c.outputs % 32 == 0 && (noise() & 1);
        c.x_bf16 = noise() & 1;
        c.y_bf16 = noise() & 1;
        run(c, noise);
      }
    }
    std::printf("level %d done\n", level);
  }
  std::printf(failures ? "%d FAILED\n" : "all right\n", failures);
  return failures != 0;
}
