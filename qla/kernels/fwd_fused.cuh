// Device functions of fwd_fused.py on raw tiles: TileLang's ldmatrix of a staged buffer reads the wrong slice, and it has no 16-byte
// row copies inside one warp. A tile is [64 rows][128 bytes], the 16-byte pieces of row r permuted by xor with r % 8. Types that
// TileLang's headers define come as template parameters, since this text stands before them.

// wait for three barriers at the cost of one: the answers come back together
template <typename B>
static __device__ __forceinline__ int qla_wait_all(B& a, int phase_a, B& b, int phase_b, B& c, int phase_c) {
  const bool ready_a = a.try_wait(phase_a), ready_b = b.try_wait(phase_b), ready_c = c.try_wait(phase_c);
  if (!(ready_a & ready_b & ready_c)) { a.wait(phase_a); b.wait(phase_b); c.wait(phase_c); }
  return 0;
}

// [token, V] tile -> registers of the accumulator layout [V, token]: 64 columns of V a warpgroup
template <typename F>
static __device__ __forceinline__ int qla_load_transposed(const void* tiles, F* out, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const int row = (lane >> 4) * 8 + (lane & 7), piece = (warp & 3) * 2 + ((lane >> 3) & 1);
  const unsigned at = (unsigned)__cvta_generic_to_shared(tiles) + (warp >> 2) * 8192 + row * 128 + ((piece ^ (row & 7)) << 4);
  unsigned* r = reinterpret_cast<unsigned*>(out);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[4 * i]), "=r"(r[4 * i + 1]), "=r"(r[4 * i + 2]), "=r"(r[4 * i + 3]) : "r"(at + i * 2048) : "memory");
  return 0;
}

// accumulators [V, token], rounded, to a [token, V] tile: the way back of qla_load_transposed
template <typename E>
static __device__ __forceinline__ int qla_store_transposed(const float* acc, void* tiles, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const int row = (lane >> 4) * 8 + (lane & 7), piece = (warp & 3) * 2 + ((lane >> 3) & 1);
  const unsigned at = (unsigned)__cvta_generic_to_shared(tiles) + (warp >> 2) * 8192 + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned r[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      E pair[2] = {E(acc[8 * i + 2 * e]), E(acc[8 * i + 2 * e + 1])};
      r[e] = *reinterpret_cast<unsigned*>(pair);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::
                 "r"(at + i * 2048), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
  return 0;
}

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
