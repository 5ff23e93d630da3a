// Segments of a cut call and their warm-ups, for the kernels that find them: cp_plan.py says what they are.
namespace qla_segments {

// bound: log2 of the chunks' transition bounds (kkt_solve). The other fields: see cp_plan.py.
struct Problem {
  const float* bound;
  const int* cu;
  int num_seqs, seq_len, tokens, heads, segment_chunks;
};

struct Segment {
  int seq, index, count, chunks, slot0;  // count: segments of the sequence; index >= count: none has this number
  __device__ __forceinline__ int edge(int j) const { return count > 0 ? (int)((long long)j * chunks / count) : 0; }
};

__device__ __forceinline__ int offset(const Problem& p, int n) { return min(max(__ldg(p.cu + n), 0), p.tokens); }
__device__ __forceinline__ int base(const Problem& p, int n) { return ((offset(p, n) >> 6) + n) / p.segment_chunks + n; }

// The sequence that owns a segment number: packed, the last n with base(n) <= number.
__device__ __forceinline__ Segment find_segment(const Problem& p, int number) {
  Segment s;
  if (p.seq_len > 0) {
    s.chunks = (p.seq_len + 63) >> 6;
    s.count = (s.chunks + p.segment_chunks - 1) / p.segment_chunks;
    s.seq = number / s.count;
    s.index = number - s.seq * s.count;
    s.slot0 = s.seq * s.chunks;
    return s;
  }
  int lo = 0, hi = p.num_seqs;
  while (hi - lo > 1) {
    const int mid = (lo + hi) >> 1;
    if (base(p, mid) <= number) lo = mid;
    else hi = mid;
  }
  const int begin = offset(p, lo);
  s.seq = lo;
  s.chunks = (max(offset(p, lo + 1) - begin, 0) + 63) >> 6;
  s.count = (s.chunks + p.segment_chunks - 1) / p.segment_chunks;
  s.index = number - base(p, lo);
  if (s.index < 0) s.index = max(s.count, 1);  // only with offsets that go back: no segment
  s.slot0 = (begin >> 6) + lo;
  return s;
}

// Chunks of one head from `chunk` on, towards the sequence's start or end, until what lies before is forgotten; -1 if `limit` are not enough.
// kAtOnce: loads in flight.
template <int kAtOnce>
__device__ __forceinline__ int warmup(const Problem& p, const Segment& s, int head, int chunk, int step, int limit, float threshold) {
  const int left = step < 0 ? chunk + 1 : s.chunks - chunk, most = min(limit, left);
  const float* at = p.bound + (long long)(s.slot0 + chunk) * p.heads + head;
  float sum = 0.f;
  for (int w = 0; w < most; w += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = w + i < most ? __ldg(at + (long long)(w + i) * step * p.heads) : 0.f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum += x[i];
      if (w + i < most && sum <= -threshold) return w + i + 1;
    }
  }
  return most == left ? left : -1;
}

}  // namespace qla_segments
