// Device code of cp_plan.py: the whole kernel is one function of one block.
namespace qla_plan {

using qla_segments::Problem;
using qla_segments::Segment;
using qla_segments::find_segment;
using qla_segments::warmup;

constexpr int kSlow = 1, kGrowing = 2;  // marks of a (sequence, head)
constexpr int kWarmup = 0, kTransition = 1, kSerial = 2;  // ways; cp_plan.py names the same
constexpr float kGrowth = 8.f;  // log2: a transition that may grow more than this is not computed
constexpr int kPieces = 8;      // of a segment, for that
constexpr int kAtOnce = 8;      // loads of bounds in flight

// Whether the transition over chunks [first, end) may grow by more than 2^limit; NaN may.
__device__ __forceinline__ bool grows(const Problem& p, const Segment& s, int head, int first, int end, float limit) {
  const float* at = p.bound + (long long)(s.slot0 + first) * p.heads + head;
  float sum = 0.f;
#pragma unroll 8
  for (int c = first; c < end; ++c, at += p.heads) {
    const float x = __ldg(at);
    sum += x <= 0.f ? 0.f : x;
  }
  return !(sum <= limit);
}

__device__ __forceinline__ int plan(const float* bound, const int* cu, int* forward, int* reverse, int* order, int* ways, int num_segments, int num_seqs,
                                    int seq_len, int tokens, int heads, int segment_chunks, int split, int inline_warmup, int max_warmup,
                                    int max_transition_heads, int max_serial_heads, int split_serial_up_to, float threshold) {
  const Problem p{bound, cu, num_seqs, seq_len, tokens, heads, segment_chunks};
  const int tid = threadIdx.x, pairs = num_seqs * heads, items = num_segments * heads;
  __shared__ int counts[2], placed[2];  // slow and growing pairs; blocks of serial and of other items
  if (tid < 2) counts[tid] = placed[tid] = 0;
  for (int i = tid; i < 2 * items; i += blockDim.x) order[i] = -1;
  for (int i = tid; i < pairs; i += blockDim.x) ways[i] = 0;
  __syncthreads();

  // what each segment would need to warm up in either direction, and who is too slow for it
  for (int k = tid; k < 2 * items; k += blockDim.x) {
    const bool after = k >= items;
    const int i = after ? k - items : k, number = i / heads, head = i - number * heads;
    const Segment s = find_segment(p, number);
    if (s.index >= s.count) continue;
    int w = 0;
    if (after && s.index + 1 < s.count) w = warmup<kAtOnce>(p, s, head, s.edge(s.index + 1), 1, max_warmup, threshold);
    if (!after && s.index > 0) w = warmup<kAtOnce>(p, s, head, s.edge(s.index) - 1, -1, max_warmup, threshold);
    (after ? reverse : forward)[4 * i] = w;
    if (w < 0) atomicOr(ways + s.seq * heads + head, kSlow);
  }
  __syncthreads();
  // whose transitions could grow: each piece of a segment by its share
  if (max_transition_heads > 0)
    for (int k = tid; k < kPieces * items; k += blockDim.x) {
      const int piece = k / items, i = k - piece * items, number = i / heads, head = i - number * heads;
      const Segment s = find_segment(p, number);
      if (s.index == 0 || s.index + 1 >= s.count || ways[s.seq * heads + head] == 0) continue;
      const int first = s.edge(s.index), chunks = s.edge(s.index + 1) - first;
      if (grows(p, s, head, first + piece * chunks / kPieces, first + (piece + 1) * chunks / kPieces, kGrowth / kPieces))
        atomicOr(ways + s.seq * heads + head, kGrowing);
    }
  __syncthreads();

  for (int i = tid; i < pairs; i += blockDim.x) {
    const int marks = ways[i];
    if (marks & kGrowing) atomicAdd(counts + 1, 1);
    else if (marks) atomicAdd(counts, 1);
  }
  __syncthreads();
  const bool transitions = counts[0] <= max_transition_heads;
  const int serial = transitions ? counts[1] : counts[0] + counts[1], serial_split = serial <= split_serial_up_to ? kSplit : 0;
  const bool whole = serial > max_serial_heads;
  if (tid == 0) order[2 * items] = whole;
  for (int i = tid; i < pairs; i += blockDim.x) {
    const int marks = ways[i];
    ways[i] = whole ? kSerial : marks == 0 ? kWarmup : marks == kSlow && transitions ? kTransition : kSerial;
  }
  __syncthreads();

  for (int i = tid; i < items; i += blockDim.x) {
    const int number = i / heads, head = i - number * heads;
    const Segment s = find_segment(p, number);
    const int j = s.index, last = s.count - 1, first = s.edge(j), end = s.edge(j + 1);
    const int way = s.seq < num_seqs ? ways[s.seq * heads + head] : kSerial;
    int4 f = make_int4(0, 0, -1, 0), r = f;  // nothing to do
    if (j < s.count && way != kSerial) {
      const int before = forward[4 * i], after = reverse[4 * i], whole = split ? kSplit : 0;
      f = make_int4(first, first, end, whole);
      r = make_int4(end, first, end, whole);
      if (j == 0) {
        f.w |= kFromState;
      } else if (way == kTransition) {
        f.x = s.edge(j - 1);
        f.w |= kFromSegment | (j == 1 ? kPrepFromState : kWithTransition);
      } else {
        f.x = first - before;
        f.w |= before > inline_warmup ? kFromSegment | (f.x == 0 ? kPrepFromState : 0) : f.x == 0 ? kFromState : 0;
      }
      if (j == last) {
        r.w |= kFromState;
      } else if (way == kTransition) {
        r.x = s.edge(j + 2);
        r.w |= kFromSegment | (j == last - 1 ? kPrepFromState : kWithTransition);
      } else {
        r.x = end + after;
        r.w |= r.x == s.chunks ? kFromState : 0;
      }
    } else if (j == 0) {  // serial, or a sequence without tokens
      f = make_int4(0, 0, s.chunks, kFromState | serial_split);
      r = make_int4(s.chunks, 0, s.chunks, kFromState | serial_split);
    }
    f.w |= s.seq << kSeqShift;
    r.w |= s.seq << kSeqShift;
    reinterpret_cast<int4*>(forward)[i] = f;
    reinterpret_cast<int4*>(reverse)[i] = r;
    if (f.z >= 0 && !whole) {  // the longest first
      const int blocks = f.w & kSplit ? 2 : 1;
      const int at = way == kSerial ? atomicAdd(placed, blocks) : serial * (serial_split ? 2 : 1) + atomicAdd(placed + 1, blocks);
      for (int part = 0; part < blocks; ++part) order[at + part] = 2 * i + part;
    }
  }
  return 0;
}

}  // namespace qla_plan
