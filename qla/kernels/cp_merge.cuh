// Where a chain begins and how many steps it has; none if its head takes no transition. Numbers of segments as in cp_plan.py.
static __device__ __forceinline__ int qla_locate_chain(int* place, const int* items, bool reverse, const int* cu, int seq, int seq_len,
                                                       int tokens, int segment_chunks, int head, int heads) {
  int begin = 0, length = seq_len;
  if (seq_len == 0) {
    begin = min(max(__ldg(cu + seq), 0), tokens);
    length = max(min(max(__ldg(cu + seq + 1), 0), tokens) - begin, 0);
  }
  const int count = (((length + 63) >> 6) + segment_chunks - 1) / segment_chunks;
  const int base = seq_len > 0 ? seq * count : ((begin >> 6) + seq) / segment_chunks + seq;
  const bool chain = count > 2 && (items[4 * ((long long)(base + 2) * heads + head) + 3] & kWithTransition);
  place[0] = reverse ? base + count - 2 : base + 1;
  place[1] = chain ? count - 2 : 0;
  return 0;
}
