// Device code of gates.py: activations of gates and of beta, element by element; gradients with sums over tokens.
namespace qla_gates {

constexpr int kThreads = 256;
constexpr int kQuad = 4;    // heads of a thread, where their number is a multiple of it
constexpr int kAtOnce = 2;  // rows of a thread, forward
constexpr int kActivateGate = 1, kHasBias = 2, kActivateBeta = 4, kTwice = 8;  // options; gates.py names the same
constexpr int kFloat = 0, kBfloat16 = 1, kFloat16 = 2;                         // types of elements; gates.py names the same

// f with the heads of a thread as a constant: four, or one where they cannot be told apart in fours
template <int WIDTH> struct Width { static constexpr int value = WIDTH; };
template <typename F> __device__ __forceinline__ int by_width(int heads, F f) {
  return heads % kQuad == 0 ? f(Width<kQuad>()) : f(Width<1>());
}

// Elements side by side, as they come from memory: to convert one is to wait for it before the next load is issued. Those of 4 bytes have
// other registers than those of 2: two loads of one register wait for each other.
template <int WIDTH> struct Raw {
  unsigned wide[WIDTH], narrow[(WIDTH + 1) / 2];
  __device__ __forceinline__ void fetch(const void* x, unsigned long long i, int type, bool wanted) {
    const bool as_wide = wanted && type == kFloat, as_narrow = wanted && type != kFloat;
    if constexpr (WIDTH == kQuad) {
      uint4 w = {};
      uint2 n = {};
      if (as_wide) w = __ldg(static_cast<const uint4*>(x) + i);
      if (as_narrow) n = __ldg(static_cast<const uint2*>(x) + i);
      wide[0] = w.x, wide[1] = w.y, wide[2] = w.z, wide[3] = w.w, narrow[0] = n.x, narrow[1] = n.y;
    } else {
      wide[0] = narrow[0] = 0;
      if (as_wide) wide[0] = __ldg(static_cast<const unsigned*>(x) + i);
      if (as_narrow) narrow[0] = __ldg(static_cast<const unsigned short*>(x) + i);
    }
  }
  __device__ __forceinline__ void convert(int type, float* to) const {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const float2 bf16 = qla_unpack<false>(narrow[j / 2]), fp16 = qla_unpack<true>(narrow[j / 2]);
      const float half = type == kBfloat16 ? (j % 2 ? bf16.y : bf16.x) : (j % 2 ? fp16.y : fp16.x);
      to[j] = type == kFloat ? __uint_as_float(wide[j]) : half;
    }
  }
};

template <int WIDTH> __device__ __forceinline__ void store(void* x, unsigned long long i, int type, const float* value) {
  if constexpr (WIDTH == kQuad) {
    if (type == kFloat) static_cast<float4*>(x)[i] = make_float4(value[0], value[1], value[2], value[3]);
    else if (type == kBfloat16) static_cast<uint2*>(x)[i] = {qla_pack<false>(value[0], value[1]), qla_pack<false>(value[2], value[3])};
    else static_cast<uint2*>(x)[i] = {qla_pack<true>(value[0], value[1]), qla_pack<true>(value[2], value[3])};
  } else {
    if (type == kFloat) static_cast<float*>(x)[i] = value[0];
    else if (type == kBfloat16) static_cast<unsigned short*>(x)[i] = qla_pack<false>(value[0], 0.f) & 0xffffu;
    else static_cast<unsigned short*>(x)[i] = qla_pack<true>(value[0], 0.f) & 0xffffu;
  }
}

// log(1 + t) for t from 0 to 1, as 2 artanh(z): seven terms of its series, since z is at most 1/3
__device__ __forceinline__ float log1p_to_1(float t) {
  const float z = __fdividef(t, 2.f + t), w = z * z;
  float sum = w * (1.f / 13) + 1.f / 11;
  sum = sum * w + 1.f / 9;
  sum = sum * w + 1.f / 7;
  sum = sum * w + 1.f / 5;
  sum = sum * w + 1.f / 3;
  return 2.f * (sum * w * z + z);
}
// softplus(x), and its derivative, both from t = exp(-|x|): no branches, so that neighbouring elements are worked on together. Above 20 they
// are x and 1 in fp32, and PyTorch has them so.
__device__ __forceinline__ float softplus(float x, float t) { return fmaxf(x, 0.f) + log1p_to_1(t); }
__device__ __forceinline__ float sigmoid(float x, float t) { return __fdividef(x < 0.f ? t : 1.f, 1.f + t); }
__device__ __forceinline__ float exp_minus_abs(float x) { return expf(-fabsf(x)); }

// A thread has WIDTH heads side by side, a unit, and every `step`-th token: neighbouring threads read neighbouring elements.
template <int WIDTH> struct Column {
  int units, width, unit;
  unsigned first, step;
  bool active;
  __device__ __forceinline__ Column(int heads, int group, int block, int blocks, int thread) {
    units = heads / WIDTH;
    width = min(kThreads, units - group * kThreads);
    const int rows = kThreads / width;
    unit = group * kThreads + thread % width;
    first = block * rows + thread / width;
    step = blocks * rows;
    active = thread < rows * width;
  }
  __device__ __forceinline__ unsigned long long place(unsigned row) const {
    return (unsigned long long)row * (unsigned)units + (unsigned)unit;
  }
};

// The first row that no sequence owns, unless it is beyond the last one: to bound it would be to wait for it.
__device__ __forceinline__ int first_unowned(const int* cu, int num_seqs, int tokens) {
  return num_seqs >= 0 ? __ldg(cu + num_seqs) : tokens;
}

// -exp(A_log) and dt_bias
template <int W>
__device__ __forceinline__ void parameters(const Raw<W>& A, const Raw<W>& bias, int A_type, int bias_type, float* rate, float* shift) {
  A.convert(A_type, rate);
  bias.convert(bias_type, shift);
#pragma unroll
  for (int j = 0; j < W; ++j) rate[j] = -expf(rate[j]);
}

// g = -exp(A_log) softplus(raw g + dt_bias), beta = sigmoid(raw beta) (twice that), or the values themselves; 0 in rows without owner.
__device__ __forceinline__ int activate(
    const void* raw_g, const void* raw_beta, const void* A_log, const void* dt_bias, float* g, float* beta, const int* cu, int options,
    int g_type, int beta_type, int A_type, int bias_type, int num_seqs, int tokens, int heads, int group, int block, int blocks,
    int thread) {
  return by_width(heads, [=](auto width) {
    constexpr int W = decltype(width)::value;
    const Column<W> at(heads, group, block, blocks, thread);
    if (!at.active) return 0;
    const bool activated = options & kActivateGate;
    Raw<W> x[kAtOnce], b[kAtOnce], A, bias;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned row = at.first + i * at.step;
      x[i].fetch(raw_g, at.place(row), g_type, row < tokens);
      b[i].fetch(raw_beta, at.place(row), beta_type, row < tokens);
    }
    A.fetch(A_log, at.unit, A_type, activated);
    bias.fetch(dt_bias, at.unit, bias_type, options & kHasBias);
    const int end = first_unowned(cu, num_seqs, tokens);
    const float factor = options & kTwice ? 2.f : 1.f;
    float rate[W], shift[W];
    parameters(A, bias, A_type, bias_type, rate, shift);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned row = at.first + i * at.step;
      if (row >= tokens) break;
      float gate[W], value[W];
      x[i].convert(g_type, gate);
      b[i].convert(beta_type, value);
      if (activated) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const float shifted = gate[j] + shift[j];
          gate[j] = rate[j] * softplus(shifted, exp_minus_abs(shifted));
        }
      }
      if (options & kActivateBeta) {
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] = factor / (1.f + expf(-value[j]));  // PyTorch's bits: beta may come from there as well
      }
#pragma unroll
      for (int j = 0; j < W; ++j) {
        gate[j] = (int)row < end ? gate[j] : 0.f;
        value[j] = (int)row < end ? value[j] : 0.f;
      }
      store<W>(g, at.place(row), kFloat, gate);
      store<W>(beta, at.place(row), kFloat, value);
    }
    return 0;
  });
}

// What a thread reads of a row for gradients.
template <int WIDTH> struct Row {
  Raw<WIDTH> g, beta, dg, dbeta;
};

// Gradients of the raw values from those of g and beta, and of A_log and dt_bias each block's part: sums [blocks, 2, heads].
__device__ __forceinline__ int differentiate(
    const float* dg, const float* dbeta, const void* raw_g, const void* raw_beta, const void* A_log, const void* dt_bias, void* draw_g,
    void* draw_beta, float* sums, float* shared, const int* cu, int options, int g_type, int beta_type, int A_type, int bias_type,
    int num_seqs, int tokens, int heads, int group, int block, int blocks, int thread) {
  return by_width(heads, [=](auto width) {
    constexpr int W = decltype(width)::value;
    const Column<W> at(heads, group, block, blocks, thread);
    const bool activated = options & kActivateGate;
    float sum_A[W] = {}, sum_bias[W] = {};
    if (at.active) {
      Row<W> next;
      Raw<W> A, bias;
      const auto fetch = [&](unsigned row) {
        next.g.fetch(raw_g, at.place(row), g_type, row < tokens && activated);
        next.beta.fetch(raw_beta, at.place(row), beta_type, row < tokens && (options & kActivateBeta));
        next.dg.fetch(dg, at.place(row), kFloat, row < tokens);
        next.dbeta.fetch(dbeta, at.place(row), kFloat, row < tokens);
      };
      fetch(at.first);
      A.fetch(A_log, at.unit, A_type, activated);
      bias.fetch(dt_bias, at.unit, bias_type, options & kHasBias);
      const int end = first_unowned(cu, num_seqs, tokens);
      const float factor = options & kTwice ? 2.f : 1.f;
      float rate[W], shift[W];
      parameters(A, bias, A_type, bias_type, rate, shift);
      for (unsigned row = at.first; row < tokens; row += at.step) {
        float gate[W], value[W], draw[W] = {}, dvalue[W] = {};
        next.g.convert(g_type, gate);
        next.beta.convert(beta_type, value);
        if ((int)row < end) {
          next.dg.convert(kFloat, draw);
          next.dbeta.convert(kFloat, dvalue);
        }
        fetch(row + at.step);
        if (activated && (int)row < end) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const float shifted = gate[j] + shift[j], t = exp_minus_abs(shifted);
            sum_A[j] += draw[j] * (rate[j] * softplus(shifted, t));
            draw[j] *= rate[j] * sigmoid(shifted, t);
            sum_bias[j] += draw[j];
          }
        }
        if ((options & kActivateBeta) && (int)row < end) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const float s = sigmoid(value[j], exp_minus_abs(value[j]));
            dvalue[j] *= factor * s * (1.f - s);
          }
        }
        store<W>(draw_g, at.place(row), g_type, draw);
        store<W>(draw_beta, at.place(row), beta_type, dvalue);
      }
    }
    if (!activated) return 0;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      shared[thread * W + j] = sum_A[j];
      shared[(kThreads + thread) * W + j] = sum_bias[j];
    }
    __syncthreads();
    const int in_row = at.width * W, first_head = group * kThreads * W;
    for (int i = thread; i < 2 * in_row; i += kThreads) {
      const int which = i >= in_row, head = i - which * in_row;
      float sum = 0.f;
      for (int row = 0; row < kThreads / at.width; ++row) sum += shared[which * kThreads * W + row * in_row + head];
      sums[(2ll * block + which) * heads + first_head + head] = sum;
    }
    return 0;
  });
}

}  // namespace qla_gates
