// Device code of fwd_fused.py.

constexpr int kBoundsAtOnce = 16;  // loads of bounds in flight

// The place of a block that finds its item without a table, by one warp: segment `number` of a value head, behind the warm-up that it needs
// of at most max_warmup chunks. If some segment of its sequence needs more, the head is serial: the first one's block walks the sequence.
static __device__ __forceinline__ int qla_locate_segment(int* place, const float* bound, const int* cu, int num_seqs, int seq_len, int tokens,
                                                         int number, int head, int heads, int ratio, int segment_chunks, int max_warmup,
                                                         float threshold, int use_state, int lane) {
  const qla_segments::Problem p{bound, cu, num_seqs, seq_len, tokens, heads, segment_chunks};
  const qla_segments::Segment s = qla_segments::find_segment(p, number);
  bool slow = false;
  int own = 0;
  for (int j = lane; j < s.count; j += 32) {
    if (j == 0) continue;
    const int w = qla_segments::warmup<kBoundsAtOnce>(p, s, head, s.edge(j) - 1, -1, max_warmup, threshold);
    slow |= w < 0;
    if (j == s.index) own = w;
  }
  slow = __any_sync(~0u, slow);
  own = __reduce_max_sync(~0u, own);
  if (lane != 0) return 0;
  const int begin = seq_len == 0 ? qla_segments::offset(p, s.seq) : s.seq * seq_len;
  const int length = seq_len == 0 ? max(qla_segments::offset(p, s.seq + 1) - begin, 0) : seq_len;
  int lo = 0, hi = s.chunks, skip = 0, ends = 1;
  if (s.index >= max(s.count, 1) || (slow && s.index > 0)) {
    hi = ends = 0;  // nothing to do
  } else if (!slow && s.count > 0) {
    lo = s.edge(s.index) - own;
    hi = s.edge(s.index + 1);
    skip = own;
    ends = hi == s.chunks;
  }
  const int source = ends + hi > 0 && lo == 0 && use_state ? kFromState : 0;
  return qla_place(place, number * heads + head, s.seq, head, ratio, begin, length, lo, hi, skip, source, ends, -1, s.slot0);
}
