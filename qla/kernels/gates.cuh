// Device code of gates.py: activations of gates and of beta, element by element; gradients with sums over tokens.
namespace qla_gates {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // rows of a thread whose loads are in flight together
constexpr int kActivateGate = 1, kHasBias = 2, kActivateBeta = 4, kTwice = 8;  // options; gates.py names the same
constexpr int kFloat = 0, kBfloat16 = 1, kFloat16 = 2;                         // types of elements; gates.py names the same

__device__ __forceinline__ float load(const void* x, long long i, int type) {
  if (type == kFloat) return __ldg(static_cast<const float*>(x) + i);
  const unsigned word = __ldg(static_cast<const unsigned short*>(x) + i);
  return type == kBfloat16 ? qla_unpack<false>(word).x : qla_unpack<true>(word).x;
}

__device__ __forceinline__ void store(void* x, long long i, int type, float value) {
  if (type == kFloat) static_cast<float*>(x)[i] = value;
  else static_cast<unsigned short*>(x)[i] = (type == kBfloat16 ? qla_pack<false>(value, 0.f) : qla_pack<true>(value, 0.f)) & 0xffffu;
}

// As PyTorch has it: the identity above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// A thread has one head and every `step`-th token: neighbouring threads read neighbouring elements.
struct Column {
  int head, first, step;
  bool active;
  __device__ __forceinline__ Column(int heads, int group, int block, int blocks, int thread) {
    const int width = min(kThreads, heads - group * kThreads), rows = kThreads / width;
    head = group * kThreads + thread % width;
    first = block * rows + thread / width;
    step = blocks * rows;
    active = thread < rows * width;
  }
};

__device__ __forceinline__ int owned_tokens(const int* cu, int num_seqs, int tokens) {
  return num_seqs >= 0 ? min(max(__ldg(cu + num_seqs), 0), tokens) : tokens;
}

// g = -exp(A_log) softplus(raw g + dt_bias), beta = sigmoid(raw beta) (twice that), or the values themselves; 0 from row `owned` on.
__device__ __forceinline__ int activate(
    const void* raw_g, const void* raw_beta, const void* A_log, const void* dt_bias, float* g, float* beta, const int* cu, int options,
    int g_type, int beta_type, int A_type, int bias_type, int num_seqs, int tokens, int heads, int group, int block, int blocks,
    int thread) {
  const Column at(heads, group, block, blocks, thread);
  if (!at.active) return 0;
  const int owned = owned_tokens(cu, num_seqs, tokens);
  const bool activated = options & kActivateGate;
  const float rate = activated ? -expf(load(A_log, at.head, A_type)) : 1.f;
  const float bias = options & kHasBias ? load(dt_bias, at.head, bias_type) : 0.f;
  const float factor = options & kTwice ? 2.f : 1.f;
  for (long long token = at.first; token < tokens; token += (long long)kAtOnce * at.step) {
    float x[kAtOnce], b[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const long long row = token + (long long)i * at.step;
      x[i] = row < owned ? load(raw_g, row * heads + at.head, g_type) : 0.f;
      b[i] = row < owned ? load(raw_beta, row * heads + at.head, beta_type) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const long long row = token + (long long)i * at.step;
      if (row >= tokens) break;
      const float gate = activated ? rate * softplus(x[i] + bias) : x[i];
      const float value = options & kActivateBeta ? factor * sigmoid(b[i]) : b[i];
      g[row * heads + at.head] = row < owned ? gate : 0.f;
      beta[row * heads + at.head] = row < owned ? value : 0.f;
    }
  }
  return 0;
}

// Gradients of the raw values from those of g and beta, and of A_log and dt_bias each block's part: sums [blocks, 2, heads].
__device__ __forceinline__ int differentiate(
    const float* dg, const float* dbeta, const void* raw_g, const void* raw_beta, const void* A_log, const void* dt_bias, void* draw_g,
    void* draw_beta, float* sums, float* shared, const int* cu, int options, int g_type, int beta_type, int A_type, int bias_type,
    int num_seqs, int tokens, int heads, int group, int block, int blocks, int thread) {
  const Column at(heads, group, block, blocks, thread);
  const int owned = owned_tokens(cu, num_seqs, tokens);
  const bool activated = options & kActivateGate;
  float sum_A = 0.f, sum_bias = 0.f;
  if (at.active) {
    const float rate = activated ? -expf(load(A_log, at.head, A_type)) : 1.f;
    const float bias = options & kHasBias ? load(dt_bias, at.head, bias_type) : 0.f;
    const float factor = options & kTwice ? 2.f : 1.f;
    for (long long token = at.first; token < tokens; token += (long long)kAtOnce * at.step) {
      float x[kAtOnce], b[kAtOnce], dx[kAtOnce], db[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const long long row = token + (long long)i * at.step, from = row * heads + at.head;
        const bool valid = row < owned;
        x[i] = valid && activated ? load(raw_g, from, g_type) : 0.f;
        b[i] = valid && (options & kActivateBeta) ? load(raw_beta, from, beta_type) : 0.f;
        dx[i] = valid ? __ldg(dg + from) : 0.f;
        db[i] = valid ? __ldg(dbeta + from) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const long long row = token + (long long)i * at.step, to = row * heads + at.head;
        if (row >= tokens) break;
        if (activated && row < owned) {
          const float shifted = x[i] + bias;
          sum_A += dx[i] * (rate * softplus(shifted));
          dx[i] *= rate * (shifted > 20.f ? 1.f : sigmoid(shifted));
          sum_bias += dx[i];
        }
        if (options & kActivateBeta) {
          const float s = sigmoid(b[i]);
          db[i] *= factor * s * (1.f - s);
        }
        store(draw_g, to, g_type, dx[i]);
        store(draw_beta, to, beta_type, db[i]);
      }
    }
  }
  if (!activated) return 0;
  shared[thread] = sum_A;
  shared[kThreads + thread] = sum_bias;
  __syncthreads();
  const int width = min(kThreads, heads - group * kThreads), rows = kThreads / width;
  if (thread < width) {
    for (int i = 1; i < rows; ++i) {
      sum_A += shared[thread + i * width];
      sum_bias += shared[kThreads + thread + i * width];
    }
    sums[(2ll * block) * heads + at.head] = sum_A;
    sums[(2ll * block + 1) * heads + at.head] = sum_bias;
  }
  return 0;
}

}  // namespace qla_gates
