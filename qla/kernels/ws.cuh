// Device functions that the kernel files share: raw 16-bit tiles <-> registers, states, rows of a chunk that is not whole, packed
// sequences. TileLang's ldmatrix of a staged buffer reads the wrong slice, and it has no 16-byte row copies inside one warp.
// A tile is [64 rows][128 bytes], the 16-byte pieces of row r permuted by xor with r % 8. Its registers are those of a wgmma
// accumulator, rounded and packed in pairs, which is also an A operand: 16 words a thread, word 4 j + 2 c + r for row 8 r + lane / 4 and
// columns 16 j + 8 c + 2 (lane % 4) of the warp's 16 rows. This text stands before TileLang's headers: types they define are template
// parameters.

static __device__ __forceinline__ unsigned qla_shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// tile `i` of consecutive ones: address arithmetic of TileLang's own would take no notice of the layout
static __device__ __forceinline__ void* qla_tile(const void* tiles, int i) { return static_cast<char*>(const_cast<void*>(tiles)) + i * 8192; }

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

// state of one head, [V, K] or [K, V] in memory, <-> accumulators [V, K] in two halves of K; 8 lanes share a 32-byte sector
#define QLA_STATE_ELEMENTS(ACTION)                                                                             \
  const int row = v0 + (thread >> 5) * 16 + ((thread & 31) >> 2), col = (thread & 3) * 2;                      \
  const int vs = v_first ? 128 : 1, ks = v_first ? 1 : 128;                                                    \
  _Pragma("unroll") for (int i = 0; i < 32; ++i) {                                                             \
    const int at = (row + ((i >> 1) & 1) * 8) * vs + (col + (i >> 2) * 8 + (i & 1)) * ks;                       \
    ACTION                                                                                                     \
  }
static __device__ __forceinline__ int qla_load_state(const float* h, int v0, int v_first, float* s0, float* s1, int thread) {
  QLA_STATE_ELEMENTS(s0[i] = h[at]; s1[i] = h[at + 64 * ks];)
  return 0;
}
static __device__ __forceinline__ int qla_store_state(float* h, int v0, int v_first, const float* s0, const float* s1, int thread) {
  QLA_STATE_ELEMENTS(h[at] = s0[i]; h[at + 64 * ks] = s1[i];)
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
