// Device functions that the kernel files share: raw 16-bit tiles <-> registers, states, rows of a chunk that is not whole, packed
// sequences. TileLang's ldmatrix of a staged buffer reads the wrong slice, and it has no 16-byte row copies inside one warp.
// A tile is [64 rows][128 bytes], the 16-byte pieces of row r permuted by xor with r % 8. Its registers are those of a wgmma
// accumulator, rounded and packed in pairs, which is also an A operand: 16 words a thread, word 4 j + 2 c + r for row 8 r + lane / 4 and
// columns 16 j + 8 c + 2 (lane % 4) of the warp's 16 rows. This text stands before TileLang's headers: types they define are template
// parameters.

static __device__ __forceinline__ unsigned qla_shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// tile `i` of consecutive ones: address arithmetic of TileLang's own would take no notice of the layout
static __device__ __forceinline__ void* qla_tile(const void* tiles, int i) { return static_cast<char*>(const_cast<void*>(tiles)) + i * 8192; }

// a value that is the same in all lanes: the compiler may keep it in a uniform register, and take branches on it as uniform
static __device__ __forceinline__ int qla_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// two floats rounded to bf16 or fp16, the first in the lower half
template <bool HALF>
static __device__ __forceinline__ unsigned qla_pack(float x, float y) {
  unsigned d;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
  return d;
}
template <bool HALF>
static __device__ __forceinline__ float2 qla_unpack(unsigned x) {
  if constexpr (HALF) {
    float2 d;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(d.x), "=f"(d.y) : "r"(x));
    return d;
  } else {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
}

// as many threads' arrivals by one
template <typename B>
static __device__ __forceinline__ int qla_arrive(B& barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(qla_shared_address(&barrier)), "r"(count) : "memory");
  return 0;
}

// wait for three barriers at the cost of one: the answers come back together
template <typename B>
static __device__ __forceinline__ int qla_wait_all(B& a, int phase_a, B& b, int phase_b, B& c, int phase_c) {
  const bool ready_a = a.try_wait(phase_a), ready_b = b.try_wait(phase_b), ready_c = c.try_wait(phase_c);
  if (!(ready_a & ready_b & ready_c)) { a.wait(phase_a); b.wait(phase_b); c.wait(phase_c); }
  return 0;
}

// ------------------------------------------------------------------------------------------------ tiles

// [row, column] tile <-> registers of [row, column]; with 256 threads the second warpgroup takes the next tile, here and below
static __device__ __forceinline__ unsigned qla_plain_address(const void* tiles, int thread) {
  return qla_shared_address(tiles) + (thread >> 5) * 2048 + (thread & 15) * 128;
}
static __device__ __forceinline__ int qla_load_plain(const void* tiles, void* out, int thread) {
  const unsigned at = qla_plain_address(tiles, thread), flip = thread & 7, side = (thread >> 4) & 1;
  unsigned* r = reinterpret_cast<unsigned*>(out);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[4 * i]), "=r"(r[4 * i + 1]), "=r"(r[4 * i + 2]), "=r"(r[4 * i + 3]) : "r"(at + (((2 * i + side) ^ flip) << 4)) : "memory");
  return 0;
}
static __device__ __forceinline__ int qla_store_plain(const void* in, void* tiles, int thread) {
  const unsigned at = qla_plain_address(tiles, thread), flip = thread & 7, side = (thread >> 4) & 1;
  const unsigned* r = reinterpret_cast<const unsigned*>(in);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::
                 "r"(at + (((2 * i + side) ^ flip) << 4)), "r"(r[4 * i]), "r"(r[4 * i + 1]), "r"(r[4 * i + 2]), "r"(r[4 * i + 3]) : "memory");
  return 0;
}

// [row, column] tile <-> registers of [column, row]
static __device__ __forceinline__ unsigned qla_transposed_address(const void* tiles, int thread) {
  asm volatile("" : "+r"(thread));  // worked out anew each time: kept across a loop it would cost a register that nobody has
  const int warp = thread >> 5, lane = thread & 31;
  const int row = (lane >> 4) * 8 + (lane & 7), piece = (warp & 3) * 2 + ((lane >> 3) & 1);
  return qla_shared_address(tiles) + (warp >> 2) * 8192 + row * 128 + ((piece ^ (row & 7)) << 4);
}
static __device__ __forceinline__ int qla_load_transposed(const void* tiles, void* out, int thread) {
  const unsigned at = qla_transposed_address(tiles, thread);
  unsigned* r = reinterpret_cast<unsigned*>(out);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[4 * i]), "=r"(r[4 * i + 1]), "=r"(r[4 * i + 2]), "=r"(r[4 * i + 3]) : "r"(at + i * 2048) : "memory");
  return 0;
}
static __device__ __forceinline__ int qla_store_transposed(const void* in, void* tiles, int thread) {
  const unsigned at = qla_transposed_address(tiles, thread);
  const unsigned* r = reinterpret_cast<const unsigned*>(in);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::
                 "r"(at + i * 2048), "r"(r[4 * i]), "r"(r[4 * i + 1]), "r"(r[4 * i + 2]), "r"(r[4 * i + 3]) : "memory");
  return 0;
}

// accumulators -> packed registers
template <bool HALF>
static __device__ __forceinline__ int qla_round(const float* acc, void* out) {
  unsigned* r = reinterpret_cast<unsigned*>(out);
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = qla_pack<HALF>(acc[2 * i], acc[2 * i + 1]);
  return 0;
}

// accumulators [V, token], rounded, to a [token, V] tile: the way back of qla_load_transposed
template <bool HALF>
static __device__ __forceinline__ int qla_store_transposed_rounded(const float* acc, void* tiles, int thread) {
  unsigned r[16];
  qla_round<HALF>(acc, r);
  return qla_store_transposed(r, tiles, thread);
}

// ------------------------------------------------------------------------------------------------ states

// state of one head, [V, K] or [K, V] in memory with V = width, <-> accumulators [V, K] in halves of K: with K = 64 there is no s1; 8 lanes
// share a 32-byte sector
#define QLA_STATE_ELEMENTS(ACTION)                                                                             \
  const int row = v0 + (thread >> 5) * 16 + ((thread & 31) >> 2), col = (thread & 3) * 2;                      \
  const int vs = v_first ? K : 1, ks = v_first ? 1 : width;                                                    \
  _Pragma("unroll") for (int i = 0; i < 32; ++i) {                                                             \
    const int at = (row + ((i >> 1) & 1) * 8) * vs + (col + (i >> 2) * 8 + (i & 1)) * ks;                       \
    ACTION                                                                                                     \
  }
template <int K>
static __device__ __forceinline__ int qla_load_state(const float* h, int width, int v0, int v_first, float* s0, float* s1, int thread) {
  QLA_STATE_ELEMENTS(s0[i] = h[at]; if constexpr (K == 128) s1[i] = h[at + 64 * ks];)
  return 0;
}
template <int K>
static __device__ __forceinline__ int qla_store_state(float* h, int width, int v0, int v_first, const float* s0, const float* s1, int thread) {
  QLA_STATE_ELEMENTS(h[at] = s0[i]; if constexpr (K == 128) h[at + 64 * ks] = s1[i];)
  return 0;
}
// state of one segment and head, which only kernels read: in the order of the accumulators, so that 16 bytes of each lane lie side by side;
// two lanes for each of the V rows. One branch on V costs less than addresses that depend on it: they take registers that nobody has.
template <int K, int V>
static __device__ __forceinline__ void qla_load_lanes(const float4* from, float* s0, float* s1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    reinterpret_cast<float4*>(s0)[i] = from[2 * V * i];
    if constexpr (K == 128) reinterpret_cast<float4*>(s1)[i] = from[2 * V * (i + 8)];
  }
}
template <int K, int V>
static __device__ __forceinline__ void qla_store_lanes(float4* to, const float* s0, const float* s1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[2 * V * i] = reinterpret_cast<const float4*>(s0)[i];
    if constexpr (K == 128) to[2 * V * (i + 8)] = reinterpret_cast<const float4*>(s1)[i];
  }
}
template <int K>
static __device__ __forceinline__ int qla_load_segment(const float* h, int width, int v0, float* s0, float* s1, int thread) {
  const float4* from = reinterpret_cast<const float4*>(h) + 2 * v0 + thread;
  if (width == 64) qla_load_lanes<K, 64>(from, s0, s1);
  else qla_load_lanes<K, 128>(from, s0, s1);
  return 0;
}
template <int K>
static __device__ __forceinline__ int qla_store_segment(float* h, int width, int v0, const float* s0, const float* s1, int thread) {
  float4* to = reinterpret_cast<float4*>(h) + 2 * v0 + thread;
  if (width == 64) qla_store_lanes<K, 64>(to, s0, s1);
  else qla_store_lanes<K, 128>(to, s0, s1);
  return 0;
}

// rows v0 .. of the identity, and accumulators as two bf16 parts, high and low, [2][K][K] of an item
template <int K>
static __device__ __forceinline__ int qla_identity(int v0, float* s0, float* s1, int thread) {
  const int v_first = 1, width = K;
  QLA_STATE_ELEMENTS(s0[i] = at % (K + 1) == 0 ? 1.f : 0.f; if constexpr (K == 128) s1[i] = (at + 64 * ks) % (K + 1) == 0 ? 1.f : 0.f;)
  return 0;
}
template <int K, typename E>
static __device__ __forceinline__ int qla_store_split(E* out, int item, int v0, const float* s0, const float* s1, int thread) {
  const int v_first = 1, width = K;
  out += item * (2ll * K * K);
  QLA_STATE_ELEMENTS(if (i % 2 == 0) {
    for (int n = 0; n < K / 64; ++n) {
      const float* s = n == 0 ? s0 : s1;
      const unsigned high = qla_pack<false>(s[i], s[i + 1]);
      const float2 f = qla_unpack<false>(high);
      *reinterpret_cast<unsigned*>(out + at + 64 * n) = high;
      *reinterpret_cast<unsigned*>(out + K * K + at + 64 * n) = qla_pack<false>(s[i] - f.x, s[i + 1] - f.y);
    }
  })
  return 0;
}

// ------------------------------------------------------------------------------------------------ a chunk that is not whole

// rows from `valid` on of `count` consecutive tiles become zero; one warp
static __device__ __forceinline__ int qla_zero_rows(void* tiles, int count, int valid, int lane) {
  for (int t = 0; t < count; ++t)
    for (int b = valid * 128 + lane * 16; b < 8192; b += 512)
      *reinterpret_cast<uint4*>(static_cast<char*>(tiles) + t * 8192 + b) = make_uint4(0, 0, 0, 0);
  return 0;
}

// the first `valid` rows of `count` consecutive tiles to rows of global memory that are `stride` elements apart; one warp
template <typename E>
static __device__ __forceinline__ int qla_store_rows(E* out, const void* tiles, int count, int valid, long long stride, int lane) {
  for (int x = lane; x < valid * count * 8; x += 32) {
    const int row = x / (count * 8), piece = x % (count * 8), tile = piece >> 3;
    const char* from = static_cast<const char*>(tiles) + tile * 8192 + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
    *reinterpret_cast<uint4*>(out + row * stride + piece * 8) = *reinterpret_cast<const uint4*>(from);
  }
  return 0;
}

// ------------------------------------------------------------------------------------------------ gates

// One warp; a lane has the chunk's tokens 2 l and 2 l + 1, as TileLang divides 64 elements among 32 threads. x: g and beta of both.
static __device__ __forceinline__ int qla_fetch_gates(const float* g, const float* beta, int begin, int first, int length, int heads, int head,
                                                      float* x, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const long long at = (long long)(begin + min(first + 2 * lane + i, length - 1)) * heads + head;
    x[i] = __ldg(g + at);
    x[2 + i] = __ldg(beta + at);
  }
  return 0;
}
static __device__ __forceinline__ int qla_take_gates(const float* x, int first, int length, float* g, float* beta, float* last, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = x[i];
    beta[i] = first + 2 * lane + i < length ? x[2 + i] : 0.f;
  }
  *last = __shfl_sync(0xffffffffu, x[1], 31);
  return 0;
}

// ------------------------------------------------------------------------------------------------ packed sequences

struct QlaRange {
  int seq, begin, end, slot0;  // slot0: first chunk slot of the sequence
};

// The sequence that owns a chunk slot: the last n with base(n) <= slot, base(n) = cu[n] / 64 + n strictly increasing. Lane l probes
// base(lo + l * step). The search begins at sequence `lo`, at or before the one looked for, with step 1, which nearly always answers
// at once; if not, it narrows the rest 32-fold a round. Offsets are clamped, so wrong ones cannot lead out of the tensors.
static __device__ __forceinline__ QlaRange qla_find_sequence(const int* cu, int num_seqs, int tokens, int slot, int lo, int lane) {
  int step = 1, hi = num_seqs + 1;
  for (bool first = true;; first = false) {
    const long long probe = lo + (long long)lane * step;
    const bool inside = probe <= num_seqs;
    const int offset = inside ? min(max(__ldg(cu + probe), 0), tokens) : tokens;
    const bool below = inside && (offset >> 6) + (int)probe <= slot;
    const int count = __popc(__ballot_sync(0xffffffffu, below));
    if (step == 1 && count < 32) {
      const int owner = max(count - 1, 0), seq = min(lo + owner, num_seqs);
      const int begin = __shfl_sync(0xffffffffu, offset, owner), end = __shfl_sync(0xffffffffu, offset, owner + 1);
      return {seq, begin, max(begin, end), (begin >> 6) + seq};
    }
    if (first) {
      lo += 31;
    } else {
      lo += max(count - 1, 0) * step;
      if (step > 1) hi = (int)min((long long)hi, (long long)lo + step);
    }
    step = max((hi - lo + 31) / 32, 1);
  }
}

// First row and number of rows of the chunk in a slot; rows is 0 where the slot is empty, negative for rows that no sequence owns.
// `seq` is a sequence at or before the slot's own, and becomes the slot's own. One warp.
struct QlaChunk {
  int row0, rows;
};
static __device__ __forceinline__ QlaChunk qla_find_chunk(const int* cu, int num_seqs, int seq_len, int tokens, int slot, int& seq, int lane) {
  if (seq_len > 0) {
    const int slots_per_seq = (seq_len + 63) >> 6;
    seq = slot / slots_per_seq;
    const int first = (slot - seq * slots_per_seq) * 64;
    return {seq * seq_len + first, min(64, seq_len - first)};
  }
  const QlaRange r = qla_find_sequence(cu, num_seqs, tokens, slot, seq, lane);
  const int chunk = slot - r.slot0;
  seq = r.seq;
  if (chunk < 0 || chunk > (r.end - r.begin - 1) >> 6) return {0, 0};  // not chunk * 64 >= length: the product may overflow
  const int row0 = r.begin + chunk * 64, rows = min(64, r.end - row0);
  return {row0, seq == num_seqs ? -rows : rows};  // past the last sequence
}

// ------------------------------------------------------------------------------------------------ what a block works on

// Fields of a block's place, which one thread writes to shared memory; ws.py names the same. With 24 registers a role has none for more
// than it uses.
enum QlaPlace { kItem, kSeq, kValueHead, kKeyHead, kRow, kRows, kChunks, kSkip, kSource, kEnds, kHalf, kSlot };
// Flags of an item and ways to use items; ws.py names the same.
constexpr int kFromState = 1, kFromSegment = 2, kIdentity = 3, kPrepFromState = 4, kWithTransition = 8, kSplit = 16, kSeqShift = 8;
enum QlaUse { kNoItems, kOwnItems, kPrepState, kPrepTransition, kOwnSegments };

// A block's place: chunks [lo, hi) of a sequence that begins in row `begin` and has `length` rows. ends: the state behind the last is wanted.
static __device__ __forceinline__ int qla_place(int* place, int row, int seq, int head, int ratio, int begin, int length, int lo, int hi, int skip,
                                                int source, int ends, int half, int slot0) {
  place[kItem] = row;
  place[kSeq] = seq;
  place[kValueHead] = head;
  place[kKeyHead] = head / ratio;
  place[kRow] = begin + lo * 64;
  place[kRows] = min(length, hi * 64) - lo * 64;
  place[kChunks] = hi - lo;
  place[kSkip] = skip;
  place[kSource] = source;
  place[kEnds] = ends;
  place[kHalf] = half;
  place[kSlot] = slot0 + lo;
  return 0;
}

// `item` is a row of `items` (start, first, end, flags | sequence << 8: see cp_plan.py) and a value head, without items a sequence and a
// head, or negative for nothing to do; the head is one of `heads` from head0 on, out of value_heads. The block walks kChunks chunks from row kRow on, kRows rows in all;
// the first kSkip in its direction only warm the state up. kEnds: the state behind the last one is wanted.
static __device__ __forceinline__ int qla_locate(int* place, const int* items, int use, bool reverse, const int* cu, int seq_len, int tokens,
                                                 int item, int part, int head0, int heads, int value_heads, int ratio, int use_state) {
  const bool idle = item < 0;
  const int number = max(item, 0) / heads, head = head0 + max(item, 0) - number * heads;
  int seq = number, source = use_state ? kFromState : 0, half = -1, ends = 1, skip = 0, lo = 0, hi = -1, end = idle ? -1 : 0;
  const int row = number * value_heads + head;
  int4 it = make_int4(0, 0, 0, 0);
  if (use != kNoItems) {
    it = *reinterpret_cast<const int4*>(items + 4ll * row);
    seq = it.w >> kSeqShift;
  }
  int begin = seq * seq_len, length = seq_len;
  if (seq_len == 0) {  // both ends clamped on their own: the difference of raw offsets may overflow
    begin = min(max(__ldg(cu + seq), 0), tokens);
    length = max(min(max(__ldg(cu + seq + 1), 0), tokens) - begin, 0);
  }
  const int chunks = (length + 63) >> 6, slot0 = (seq_len == 0 ? begin >> 6 : seq * chunks) + (seq_len == 0 ? seq : 0);
  hi = chunks;
  if (use == kOwnItems) {
    const bool segment = it.w & kFromSegment;
    lo = reverse ? it.y : segment ? it.y : it.x;
    hi = !reverse ? it.z : segment ? it.z : it.x;
    skip = reverse ? hi - it.z : it.y - lo;
    ends = reverse ? it.y == 0 : it.z == chunks;
    source = segment ? kFromSegment : it.w & source;
    if (it.w & kSplit) half = part;
    if (it.z < 0) end = -1;
  } else if (use != kNoItems) {
    lo = reverse ? it.z : it.x;
    hi = reverse ? it.x : it.y;
    skip = hi - lo;
    source = use == kPrepTransition ? kIdentity : it.w & kPrepFromState ? source : 0;
    if (!(it.w & (use == kPrepTransition ? kWithTransition : kFromSegment))) end = -1;
  }
  if (end < 0) hi = lo = skip = ends = source = 0;
  return qla_place(place, row, seq, head, ratio, begin, length, lo, hi, skip, source, ends, half, slot0);
}

