// How are norms, gates, rotations and draws computed? Included by one file for each variant; see
// elementwise_wide.h.
#include "dtype.h"
#include "elementwise.h"
#include "elementwise_wide.h"

namespace {

template <class T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    T* sum = static_cast<T*>(a.sum) + row * a.sum_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    F squares = {};
    if (a.delta != nullptr) {
      const T* delta = static_cast<const T*>(a.delta) + row * a.delta_stride;
      for (int64_t i = 0; i < a.size; i += W) {
        int64_t n = a.size - i;
        store_some(sum + i, load_some(sum + i, n) + load_some(delta + i, n), n);
      }
    }
    for (int64_t i = 0; i < a.size; i += W) {
      F x = load_some(sum + i, a.size - i);
      squares += x * x;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / float(a.size) + float(a.eps));
    for (int64_t i = 0; i < a.size; i += W) {
      int64_t n = a.size - i;
      store_some(out + i, load_some(sum + i, n) * scale * load_some(weight + i, n), n);
    }
  }
}

template <class T>
void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * a.gate_up_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    for (int64_t i = 0; i < a.size; i += W) {
      int64_t n = a.size - i;
      F x = load_some(gate + i, n);
      F y = x / (1.0f + exp_of(-x)) * load_some(gate + a.size + i, n);
      store_some(out + i, y, n);
    }
  }
}

// x (float, in place) turned by cosines and signed sines, [2, D].
inline void turn_head(float* x, const float* table, int64_t size) {
  int64_t half = size / 2;
  const float *cos = table, *sin = table + size;
  for (int64_t i = 0; i < half; i += W) {
    int64_t n = half - i;
    F low = load_some(x + i, n), high = load_some(x + half + i, n);
    F new_low = low * load_some(cos + i, n) + high * load_some(sin + i, n);
    F new_high = high * load_some(cos + half + i, n) + low * load_some(sin + half + i, n);
    store_some(x + i, new_low, n);
    store_some(x + half + i, new_high, n);
  }
}

template <class T>
inline void norm_head(float* x, const T* weight, int64_t size, float eps) {
  F squares = {};
  for (int64_t i = 0; i < size; i += W) {
    F part = load_some(x + i, size - i);
    squares += part * part;
  }
  float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += W) {
    int64_t n = size - i;
    store_some(x + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
  }
}

template <class From, class To>
inline void convert(const From* from, To* to, int64_t size) {
  for (int64_t i = 0; i < size; i += W) store_some(to + i, load_some(from + i, size - i), size - i);
}

// A head as codes from -127 to 127 and the scale that makes numbers of them; NaN where a number is
// not finite.
inline void encode_head(const float* x, I8* codes, uint16_t* scale, int64_t size) {
  const float most = 127.0f;
  F largest = {}, broken = {};
  for (int64_t i = 0; i < size; i += W) {
    F part = load_some(x + i, size - i);
    largest = larger(magnitude(part), largest);
    broken += part - part;
  }
  *scale = _cvtss_sh(max_of(largest) / most + sum_of(broken), _MM_FROUND_TO_NEAREST_INT);
  float rounded = _cvtsh_ss(*scale);
  float inverse = rounded > 0 ? 1.0f / rounded : 0.0f;
  for (int64_t i = 0; i < size; i += W) {
    F part = load_some(x + i, size - i) * inverse;
    part = part > most ? all(most) : part;
    part = part < -most ? all(-most) : part;
    I whole = near(part);
    for (int64_t j = 0; j < W && i + j < size; ++j) codes[i + j].code = int8_t(whole[j]);
  }
}

// The same of 4 bits, from 0 to 15, with what is added to them.
inline void encode_pairs(const float* x, I4* pairs, uint16_t* scale, uint16_t* low, int64_t size) {
  F least = all(x[0]), most = least, broken = {};
  for (int64_t i = 0; i < size; i += W) {
    F part = load(x + i);
    least = part < least ? part : least;
    most = larger(part, most);
    broken += part - part;
  }
  const float spoiled = sum_of(broken), lowest = -max_of(-least);
  *scale = _cvtss_sh((max_of(most) - lowest) / 15.0f + spoiled, _MM_FROUND_TO_NEAREST_INT);
  *low = _cvtss_sh(lowest + spoiled, _MM_FROUND_TO_NEAREST_INT);
  const float step = _cvtsh_ss(*scale), begin = _cvtsh_ss(*low);
  const float inverse = step > 0 ? 1.0f / step : 0.0f;
  const int64_t half = size / 2;
  uint8_t codes[MAX_HEAD_DIM];
  for (int64_t i = 0; i < size; i += W) {
    F part = step > 0 ? (load(x + i) - begin) * inverse : F{};
    part = part > 15.0f ? all(15.0f) : part;
    part = part < 0.0f ? F{} : part;
    I whole = near(part);
    for (int64_t j = 0; j < W; ++j) codes[i + j] = uint8_t(whole[j]);
  }
  for (int64_t i = 0; i < half; ++i) pairs[i].pair = uint8_t(codes[i] | codes[half + i] << 4);
}

inline void narrow(const float* x, E4m3* to, int64_t size) {
  for (int64_t i = 0; i < size; i += W) {
    I bits = e4m3_of(load_some(x + i, size - i));
    for (int64_t j = 0; j < W && i + j < size; ++j) to[i + j].bits = uint8_t(bits[j]);
  }
}

// Where a row's keys and values go, of all KV heads, and as what.
template <class T>
struct Slot {
  const RotateArgs& a;
  int64_t at, scale_at;

  Slot(const RotateArgs& args, int64_t slot) : a(args) {
    int64_t block = slot / a.block_size, offset = slot % a.block_size;
    at = block * a.block_stride + offset * a.slot_stride;
    scale_at = block * a.scale_block_stride + offset * a.scale_slot_stride;
  }

  void put(const float* x, void* cache, uint16_t* scales, uint16_t* lows, int64_t head) const {
    int64_t place = at + head * a.head_stride, scale = scale_at + head * a.scale_head_stride;
    switch (a.kv_dtype) {
      case RL_I8:
        return encode_head(x, static_cast<I8*>(cache) + place, scales + scale, a.head_dim);
      case RL_I4:
        return encode_pairs(x, static_cast<I4*>(cache) + place, scales + scale, lows + scale,
                            a.head_dim);
      case RL_E4M3:
        return narrow(x, static_cast<E4m3*>(cache) + place, a.head_dim);
      default:
        return convert(x, static_cast<T*>(cache) + place, a.head_dim);
    }
  }

  void put_key(float* x, int64_t head) const {
    if (a.kv_dtype == RL_I4) hadamard(x, a.head_dim);
    put(x, a.k, a.k_scales, a.k_lows, head);
  }
  void put_value(const float* x, int64_t head) const { put(x, a.v, a.v_scales, a.v_lows, head); }
};

template <class T>
void rotate_rows(const RotateArgs& a, int64_t begin, int64_t end) {
  float x[MAX_HEAD_DIM];
  int64_t size = a.head_dim;
  for (int64_t row = begin; row < end; ++row) {
    T* head = static_cast<T*>(a.qkv) + row * a.stride;
    const float* table = a.table + a.positions[row] * 2 * size;
    bool is_kept = a.slots[row] >= 0;
    const Slot<T> slot(a, is_kept ? a.slots[row] : 0);
    for (int64_t h = 0; h < a.heads + a.kv_heads; ++h, head += size) {
      const T* weight = static_cast<const T*>(h < a.heads ? a.q_weight : a.k_weight);
      convert(head, x, size);
      if (weight != nullptr) norm_head(x, weight, size, float(a.eps));
      turn_head(x, table, size);
      if (h < a.heads) {
        convert(x, head, size);
      } else if (is_kept) {
        slot.put_key(x, h - a.heads);
      }
    }
    for (int64_t h = 0; h < a.kv_heads && is_kept; ++h, head += size) {
      convert(head, x, size);
      slot.put_value(x, h);
    }
  }
}

// Log of a positive, normal number to 2 ulp (Cephes' polynomial).
inline F log_of(F x) {
  U bits = (U)x;
  I power = (I)(bits >> 23) - 126;
  F m = (F)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  I is_small = m < 0.70710678118654752440f;
  power += is_small;  // -1 where true
  m = m + (F)(is_small & (I)m) - 1.0f;
  F z = m * m;
  F y = all(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  F e = __builtin_convertvector(power, F);
  y = y * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}

typedef uint64_t Wide __attribute__((vector_size(W * 8)));

// log(1 + x) without losing small x: the error of 1 + x is put back (Kahan).
inline F log1p_of(F x) {
  F whole = 1.0f + x;
  I is_lost = whole == 1.0f;
  F safe = is_lost ? all(2.0f) : whole;
  return is_lost ? x : log_of(safe) * (x / (safe - 1.0f));
}

// Standard Gumbel noise with its sign turned, of the W tokens from `token` on; see kernels.noise.
inline F minus_gumbel(uint64_t start, int64_t token) {
  Wide z;
  for (int j = 0; j < W; ++j) z[j] = uint64_t(token + 1 + j);
  z = z * 0xD1342543DE82EF95ull + start;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  F high = __builtin_convertvector(__builtin_convertvector(z >> 32, U), F);
  F uniform = (high + 0.5f) * 0x1p-32f;
  const float below_one = 1.0f - 0x1p-24f;
  uniform = uniform > below_one ? all(below_one) : uniform;
  return log_of(-log1p_of(-uniform));
}

struct Best {
  F score = all(-__builtin_inff());
  I at = {};
  I broken = {};

  void look(F x, I here) {
    broken |= x != x;
    I is_better = x > score;
    score = is_better ? x : score;
    at = is_better ? here : at;
  }

  void tell(float* most, int64_t* where) const {
    *most = -__builtin_inff(), *where = INT64_MAX;
    for (int j = 0; j < W; ++j) {
      if (broken[j]) *most = __builtin_nanf("");
      bool is_first = score[j] == *most && at[j] < *where;
      if (score[j] > *most || is_first) *most = score[j], *where = at[j];
    }
  }
};

template <class T>
inline F scores(const T* logits, int64_t n) {
  F x = load_some(logits, n);
  for (int64_t j = n; j < W; ++j) x[j] = -__builtin_inff();
  return x;
}

template <class T>
void best_logit(const DrawArgs& a, int64_t row, int64_t begin, int64_t end, float* score,
                int64_t* at) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  I here;
  for (int j = 0; j < W; ++j) here[j] = int32_t(begin) + j;
  Best best;
  int64_t i = begin;
  for (; i + W <= end; i += W, here += W) best.look(load(logits + i), here);
  if (i < end) best.look(scores(logits + i, end - i), here);
  best.tell(score, at);
}

template <class T>
void best_draw(const DrawArgs& a, int64_t row, int64_t begin, int64_t end, float level,
               float* score, int64_t* at) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  uint64_t start = uint64_t(a.keys[row]) + uint64_t(a.positions[row]) * 0x9E3779B97F4A7C15ull;
  I here;
  for (int j = 0; j < W; ++j) here[j] = int32_t(begin) + j;
  Best best;
  for (int64_t i = begin; i < end; i += W, here += W) {
    F x = (scores(logits + i, end - i) - level) / a.temperatures[row];
    best.look(x - minus_gumbel(start, i) * a.noisy[row], here);
  }
  best.tell(score, at);
}

// Odds of the W tokens from `i` on, 0 behind the end.
template <class T>
inline F odds_at(const Odds& o, int64_t i, int64_t end) {
  F x = scores(static_cast<const T*>(o.logits) + i, end - i);
  return exp_of((x - o.level) / o.temperature) * o.scale;
}

template <class T>
void mass_of(const Odds& o, int64_t begin, int64_t end, float* most, float* sum) {
  const T* logits = static_cast<const T*>(o.logits);
  Best best;
  for (int64_t i = begin; i < end; i += W) best.look(scores(logits + i, end - i), I{});
  int64_t at;
  best.tell(most, &at);
  *sum = 0;
  if (*most - *most != 0) return;  // NaN, or an infinity
  Odds here = o;
  here.level = *most, here.scale = 1.0f;
  F sums = {};
  for (int64_t i = begin; i < end; i += W) sums += odds_at<T>(here, i, end);
  *sum = sum_of(sums);
}

template <class P, class Q>
void rest_of(const Odds& p, const Odds& q, uint64_t start, int64_t begin, int64_t end,
             float* score, int64_t* at) {
  I here;
  for (int j = 0; j < W; ++j) here[j] = int32_t(begin) + j;
  Best best;
  for (int64_t i = begin; i < end; i += W, here += W) {
    F left = odds_at<P>(p, i, end) - odds_at<Q>(q, i, end);
    I is_left = left > 0x1p-126f;
    F safe = is_left ? left : all(1.0f);
    F x = log_of(safe) - minus_gumbel(start, i);
    best.look(is_left ? x : all(-__builtin_inff()), here);
  }
  best.tell(score, at);
}

#define BY_DTYPE(name, args, ...) \
  ((args).dtype == 0 ? name<float>(args, __VA_ARGS__) : name<B16>(args, __VA_ARGS__))

void norm(const NormArgs& a, int64_t begin, int64_t end) { BY_DTYPE(norm_rows, a, begin, end); }

void gate(const GateArgs& a, int64_t begin, int64_t end) { BY_DTYPE(gate_rows, a, begin, end); }

void turn(const RotateArgs& a, int64_t begin, int64_t end) { BY_DTYPE(rotate_rows, a, begin, end); }

void largest(const DrawArgs& a, int64_t row, int64_t begin, int64_t end, float* score,
             int64_t* at) {
  BY_DTYPE(best_logit, a, row, begin, end, score, at);
}

void draw(const DrawArgs& a, int64_t row, int64_t begin, int64_t end, float level, float* score,
          int64_t* at) {
  BY_DTYPE(best_draw, a, row, begin, end, level, score, at);
}

void mass(const Odds& o, int64_t begin, int64_t end, float* most, float* sum) {
  BY_DTYPE(mass_of, o, begin, end, most, sum);
}

template <class P>
void rest_from(const Odds& p, const Odds& q, uint64_t start, int64_t begin, int64_t end,
               float* score, int64_t* at) {
  if (q.dtype == 0) return rest_of<P, float>(p, q, start, begin, end, score, at);
  rest_of<P, B16>(p, q, start, begin, end, score, at);
}

void rest(const Odds& p, const Odds& q, uint64_t start, int64_t begin, int64_t end, float* score,
          int64_t* at) {
  BY_DTYPE(rest_from, p, q, start, begin, end, score, at);
}

constexpr ElementwiseVariant functions = {norm, gate, turn, largest, draw, mass, rest};

}  // namespace
