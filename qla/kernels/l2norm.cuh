// Device code of l2norm.py: LANES lanes a row, eight or sixteen, with eight neighbouring elements each.
namespace qla_l2norm {

constexpr int kAtOnce = 4;  // rows of a group of lanes whose loads are in flight together

// Where a tensor [tokens, heads, K] lies: elements from a token, and from a head, to the next.
struct Rows {
  long long token_stride;
  int head_stride, heads;
  __device__ __forceinline__ long long at(int row) const {
    const int token = row / heads;
    return token * token_stride + (long long)(row - token * heads) * head_stride;
  }
};

template <int LANES>
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

template <bool HALF>
__device__ __forceinline__ void unpack(const uint4& in, float (&x)[8]) {
  const unsigned words[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = qla_unpack<HALF>(words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <bool HALF>
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
  return make_uint4(qla_pack<HALF>(x[0], x[1]), qla_pack<HALF>(x[2], x[3]), qla_pack<HALF>(x[4], x[5]), qla_pack<HALF>(x[6], x[7]));
}

__device__ __forceinline__ int owned_rows(const int* cu, int num_seqs, int tokens, int heads) {
  return (num_seqs >= 0 ? min(max(__ldg(cu + num_seqs), 0), tokens) : tokens) * heads;
}

// y = x r with r = rsqrt(sum x^2 + eps), and r; rows from `owned` on are not read, and become 0.
template <bool HALF, int LANES>
__device__ __forceinline__ int normalize_rows(
    const void* x_, long long token_stride, int head_stride, void* y_, float* r, const int* cu, int num_seqs, int tokens, int heads,
    float eps, int block, int blocks, int thread) {
  const Rows place{token_stride, head_stride, heads};
  const char* x = static_cast<const char*>(x_);
  char* y = static_cast<char*>(y_);
  const int rows = tokens * heads, owned = owned_rows(cu, num_seqs, tokens, heads);
  const int lane = thread % LANES, group = thread / LANES, groups = blockDim.x / LANES;
  for (int first = block * groups * kAtOnce; first < rows; first += blocks * groups * kAtOnce) {
    uint4 in[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * groups + group;
      in[i] = make_uint4(0, 0, 0, 0);
      if (row < owned) in[i] = __ldg(reinterpret_cast<const uint4*>(x + 2 * (place.at(row) + 8 * lane)));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * groups + group;
      float v[8], sum = 0.f;
      unpack<HALF>(in[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
      sum = sum_of_row<LANES>(sum);
      const float factor = row < owned ? rsqrtf(sum + eps) : 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= factor;
      if (row < rows) {
        *reinterpret_cast<uint4*>(y + 16 * ((long long)LANES * row + lane)) = pack<HALF>(v);
        if (lane == 0) r[row] = factor;
      }
    }
  }
  return 0;
}
template <bool HALF>
__device__ __forceinline__ int normalize(
    const void* x, long long token_stride, int head_stride, void* y, float* r, const int* cu, int num_seqs, int tokens, int heads, int dim,
    float eps, int block, int blocks, int thread) {
  if (dim == 64) return normalize_rows<HALF, 8>(x, token_stride, head_stride, y, r, cu, num_seqs, tokens, heads, eps, block, blocks, thread);
  return normalize_rows<HALF, 16>(x, token_stride, head_stride, y, r, cu, num_seqs, tokens, heads, eps, block, blocks, thread);
}

// dx = r (dy - y (y . dy)); all contiguous. r = 0 where no sequence owns the row: dx = 0.
template <bool HALF, int LANES>
__device__ __forceinline__ int differentiate_rows(
    const void* dy_, const void* y_, const float* r, void* dx_, int rows, int block, int blocks, int thread) {
  const char *dy = static_cast<const char*>(dy_), *y = static_cast<const char*>(y_);
  char* dx = static_cast<char*>(dx_);
  const int lane = thread % LANES, group = thread / LANES, groups = blockDim.x / LANES;
  for (int first = block * groups * kAtOnce; first < rows; first += blocks * groups * kAtOnce) {
    uint4 in[kAtOnce], normalized[kAtOnce];
    float factor[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * groups + group;
      in[i] = normalized[i] = make_uint4(0, 0, 0, 0);
      factor[i] = 0.f;
      if (row < rows) {
        const long long at = 16 * ((long long)LANES * row + lane);
        factor[i] = __ldg(r + row);
        normalized[i] = __ldg(reinterpret_cast<const uint4*>(y + at));
        in[i] = __ldg(reinterpret_cast<const uint4*>(dy + at));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * groups + group;
      float d[8], n[8], sum = 0.f;
      unpack<HALF>(in[i], d);
      unpack<HALF>(normalized[i], n);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += d[j] * n[j];
      sum = sum_of_row<LANES>(sum);
#pragma unroll
      for (int j = 0; j < 8; ++j) d[j] = factor[i] * (d[j] - n[j] * sum);
      if (row < rows) *reinterpret_cast<uint4*>(dx + 16 * ((long long)LANES * row + lane)) = pack<HALF>(d);
    }
  }
  return 0;
}
template <bool HALF>
__device__ __forceinline__ int differentiate(
    const void* dy, const void* y, const float* r, void* dx, int rows, int dim, int block, int blocks, int thread) {
  if (dim == 64) return differentiate_rows<HALF, 8>(dy, y, r, dx, rows, block, blocks, thread);
  return differentiate_rows<HALF, 16>(dy, y, r, dx, rows, block, blocks, thread);
}

}  // namespace qla_l2norm
