// Device functions of bwd_fused.py: the elementwise work on wgmma accumulators [64, 64], and the ends of a chunk.
// `tid` counts within a warpgroup. A thread holds rows row(tid) and row(tid) + 8: element e belongs to row r = (e >> 1) & 1 of the two and to
// column 8 (e >> 2) + 2 (tid & 3) + (e & 1). Sums over a row are kept per thread and row, and put together once a head.
namespace qla_bwd {

constexpr unsigned kAll = 0xffffffffu;

// Fields of `rows`, what a thread knows of its two rows (x + r): gate and beta; and the chunk's last gate.
enum Row { kGate = 0, kBeta = 2, kLast = 4 };
// Fields of `sums`: gradients of gates by token that reads the state, by token that writes it, and of beta.
enum Sum { kReads = 0, kWrites = 2, kBetas = 4 };
// Sums of a head in shared memory, [64] each: those of QUERIES with the columns' sums of each of its warps, [4, 64], for E and for F; those
// of KEYS; those of VALUES, and <S, dS> in a part from each of its warps.
enum Place {
  kQueryReads = 0, kQueryBetas = 64, kScoreColumns = 128, kInverseColumns = 384, kKeyWrites = 640, kKeyReads = 704, kKeyBetas = 768,
  kValueBetas = 832, kDots = 896
};

// The same number, of which the compiler knows nothing: what is worked out from it is not carried around the loop over heads in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
__device__ __forceinline__ int first_row(int tid) { return (tid >> 5) * 16 + ((tid & 31) >> 2); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ int read_rows(const float* g, const float* beta, float* rows, float* sums, int tid) {
  tid = opaque(tid);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[kGate + r] = g[first_row(tid) + 8 * r];
    rows[kBeta + r] = beta[first_row(tid) + 8 * r];
  }
  rows[kLast] = g[63];  // past the end of a sequence the gate stays at the last token's
#pragma unroll
  for (int i = 0; i < 6; ++i) sums[i] = 0.f;
  return 0;
}

// <S, dS>, states of SIZE elements, a part from each warp
template <int SIZE, bool HALF>
__device__ __forceinline__ int dot_states(const void* s, const void* ds, float* out, int tid) {
  tid = opaque(tid);
  float sums[2] = {0.f, 0.f};
#pragma unroll 2
  for (int i = tid; i < SIZE / 8; i += 128) {
    const uint4 x = static_cast<const uint4*>(s)[i], y = static_cast<const uint4*>(ds)[i];
    const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = qla_unpack<HALF>(xs[j]), b = qla_unpack<HALF>(ys[j]);
      sums[0] = fmaf(a.x, b.x, sums[0]);
      sums[1] = fmaf(a.y, b.y, sums[1]);
    }
  }
  float sum = sums[0] + sums[1];
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kAll, sum, d);
  if ((tid & 31) == 0) out[kDots + (tid >> 5)] = sum;
  return 0;
}

// V and dW in pieces of 16 bytes: LANES lanes have a row; a thread has its piece of ROWS rows, which are 128 / LANES apart.
template <int V>
struct Pieces {
  static constexpr int LANES = V / 8, BITS = V == 128 ? 4 : 3, STEP = 128 / LANES, ROWS = 64 / STEP;
};

// Rows past the end of a sequence are zero.
template <int V, typename E>
__device__ __forceinline__ int load_values(const E* v, long long stride, int rows, unsigned* out, int tid) {
  using P = Pieces<V>;
  tid = opaque(tid);
#pragma unroll
  for (int i = 0; i < P::ROWS; ++i) {
    const int row = (tid >> P::BITS) + P::STEP * i;
    reinterpret_cast<uint4*>(out)[i] =
        row < rows ? *reinterpret_cast<const uint4*>(v + row * stride + (tid & (P::LANES - 1)) * 8) : make_uint4(0, 0, 0, 0);
  }
  return 0;
}

// dV = diag(beta) dW to memory, and sums of dW * V over V: those of a thread's rows over the lanes of a row, which exchange halves of them
template <int V, bool HALF, typename E>
__device__ __forceinline__ int finish_values(const void* dw, const unsigned* v, const float* beta, E* dv, long long stride, int rows,
                                             float* out, int tid) {
  using P = Pieces<V>;
  tid = opaque(tid);
  const int piece = tid & (P::LANES - 1), first = tid >> P::BITS, of_eight = P::STEP == 8 ? first : first & 7;
  const char* from = static_cast<const char*>(dw) + (piece >> 3) * 8192 + first * 128 + (((piece & 7) ^ of_eight) << 4);
  float sums[P::ROWS];
#pragma unroll
  for (int i = 0; i < P::ROWS; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + i * (P::STEP * 128));
    const unsigned xs[4] = {x.x, x.y, x.z, x.w};
    const float b = beta[first + P::STEP * i];
    unsigned y[4];
    sums[i] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 w = qla_unpack<HALF>(xs[j]), u = qla_unpack<HALF>(v[4 * i + j]);
      sums[i] = fmaf(w.x, u.x, fmaf(w.y, u.y, sums[i]));
      y[j] = qla_pack<HALF>(b * w.x, b * w.y);
    }
    const int row = first + P::STEP * i;
    if (row < rows) *reinterpret_cast<uint4*>(dv + row * stride + piece * 8) = make_uint4(y[0], y[1], y[2], y[3]);
  }
#pragma unroll
  for (int half = P::ROWS / 2; half > 0; half >>= 1) {
    const bool upper = piece & (2 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? sums[i + half] : sums[i], other = upper ? sums[i] : sums[i + half];
      sums[i] = mine + __shfl_xor_sync(kAll, other, 2 * half);
    }
  }
  sums[0] += __shfl_xor_sync(kAll, sums[0], 1);
  if ((piece & 1) == 0) out[kValueBetas + first + P::STEP * (piece >> 1)] = sums[0];
  return 0;
}

template <bool HALF>
__device__ __forceinline__ int store_rounded(const float* acc, void* tile, int tid) {
  tid = opaque(tid);
  unsigned out[16];
  qla_round<HALF>(acc, out);
  qla_store_plain(out, tile, tid);
  fence();
  return 0;
}

// dK += diag(gamma_L / gamma) (Vd dS^T), whose product with K summed over K is what each token writes to the state
template <bool HALF>
__device__ __forceinline__ int add_written(float* dk, const float* acc, const void* k_tile, const float* rows, float* sums, int tid) {
  tid = opaque(tid);
  unsigned k[16];
  float with_k[2] = {0.f, 0.f};
  const float last = opaque(rows[kLast]), rest[2] = {exp2_fast(last - rows[kGate]), exp2_fast(last - rows[kGate + 1])};
  qla_load_plain(k_tile, k, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 b = qla_unpack<HALF>(k[i]);
    const int r = i & 1;
    with_k[r] = fmaf(acc[2 * i], b.x, fmaf(acc[2 * i + 1], b.y, with_k[r]));
    dk[2 * i] = fmaf(rest[r], acc[2 * i], dk[2 * i]);
    dk[2 * i + 1] = fmaf(rest[r], acc[2 * i + 1], dk[2 * i + 1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[kWrites + r] = fmaf(rest[r], with_k[r], sums[kWrites + r]);
  return 0;
}

// dK -= diag(beta gamma) (dW S^T); the sum of K * (dW S^T) over K is that of dW * U over V
template <bool HALF>
__device__ __forceinline__ int add_read(float* dk, const float* acc, const void* k_tile, const float* rows, float* sums, int tid) {
  tid = opaque(tid);
  unsigned k[16];
  float with_u[2] = {0.f, 0.f};
  const float gamma[2] = {exp2_fast(opaque(rows[kGate])), exp2_fast(opaque(rows[kGate + 1]))};
  const float scale[2] = {-rows[kBeta] * gamma[0], -rows[kBeta + 1] * gamma[1]};
  qla_load_plain(k_tile, k, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 b = qla_unpack<HALF>(k[i]);
    const int r = i & 1;
    with_u[r] = fmaf(acc[2 * i], b.x, fmaf(acc[2 * i + 1], b.y, with_u[r]));
    dk[2 * i] = fmaf(scale[r], acc[2 * i], dk[2 * i]);
    dk[2 * i + 1] = fmaf(scale[r], acc[2 * i + 1], dk[2 * i + 1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[kBetas + r] -= gamma[r] * with_u[r];
    sums[kReads + r] += scale[r] * with_u[r];
  }
  return 0;
}

// dQ += s diag(gamma) (dO S^T), and its product with Q summed over K
template <bool HALF>
__device__ __forceinline__ int add_query(float* dq, const float* acc, const void* q_tile, const float* rows, float* sums, float log2_scale,
                                         int tid) {
  tid = opaque(tid);
  unsigned q[16];
  float with_q[2] = {0.f, 0.f};
  const float scaled[2] = {exp2_fast(rows[kGate] + log2_scale), exp2_fast(rows[kGate + 1] + log2_scale)};
  qla_load_plain(q_tile, q, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 b = qla_unpack<HALF>(q[i]);
    const int r = i & 1;
    with_q[r] = fmaf(acc[2 * i], b.x, fmaf(acc[2 * i + 1], b.y, with_q[r]));
    dq[2 * i] = fmaf(scaled[r], acc[2 * i], dq[2 * i]);
    dq[2 * i + 1] = fmaf(scaled[r], acc[2 * i + 1], dq[2 * i + 1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[kReads + r] = fmaf(scaled[r], with_q[r], sums[kReads + r]);
  return 0;
}

// Sums over the warp's rows of 16 columns a thread: 14 exchanges, after which lane 4 j + t holds columns 8 j + 2 t and the next.
template <int HALF_COUNT>
__device__ __forceinline__ void exchange_columns(float (&c)[16], int lane) {
  const bool upper = lane & (2 * HALF_COUNT);
#pragma unroll
  for (int i = 0; i < HALF_COUNT; ++i) {
    const float mine = upper ? c[i + HALF_COUNT] : c[i], other = upper ? c[i] : c[i + HALF_COUNT];
    c[i] = mine + __shfl_xor_sync(kAll, other, 2 * HALF_COUNT);
  }
}
__device__ __forceinline__ void store_columns(float (&c)[16], float* out, int tid) {
  const int lane = tid & 31;
  exchange_columns<8>(c, lane);
  exchange_columns<4>(c, lane);
  exchange_columns<2>(c, lane);
  *reinterpret_cast<float2*>(out + (tid >> 5) * 64 + (lane >> 2) * 8 + (lane & 3) * 2) = make_float2(c[0], c[1]);
}

// E = s Lower(Gamma * dP), rounded; its product with Q K^T (= dP * P) moves the gates
template <bool HALF>
__device__ __forceinline__ int pair_scores(const float* dp, const float* qk, const float* g, float log2_scale, const float* rows,
                                           void* out_rows, float* sums, float* out_sums, int tid) {
  tid = opaque(tid);
  unsigned* out = static_cast<unsigned*>(out_rows);
  float columns[16];
  const float gates[2] = {opaque(rows[kGate]), opaque(rows[kGate + 1])};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = i & 1, row = first_row(tid) + 8 * r, column = 8 * (i >> 1) + 2 * (tid & 3);
    const float gate = gates[r] + log2_scale;
    // the mask comes after the exponential, where an upper entry may be infinite
    const float x = exp2_fast(gate - g[column]) * dp[2 * i], y = exp2_fast(gate - g[column + 1]) * dp[2 * i + 1];
    out[i] = qla_pack<HALF>(row >= column ? x : 0.f, row > column ? y : 0.f);
    const float x_moved = row > column ? x * qk[2 * i] : 0.f, y_moved = row > column + 1 ? y * qk[2 * i + 1] : 0.f;
    sums[kReads + r] += x_moved + y_moved;
    columns[i & ~1] = r == 0 ? x_moved : columns[i & ~1] + x_moved;
    columns[i | 1] = r == 0 ? y_moved : columns[i | 1] + y_moved;
  }
  store_columns(columns, out_sums + kScoreColumns, tid);
  return 0;
}

// n = dW Vd^T. With Z = -StrictLower(Gamma * n): beta's gradient gains the rows of Z * K K^T, the gates' move by beta times that, and
// F = diag(beta) Z, rounded
template <bool HALF>
__device__ __forceinline__ int pair_inverse(const float* n, const float* kk, const float* g, const float* rows, void* out_rows, float* sums,
                                            float* out_sums, int tid) {
  tid = opaque(tid);
  unsigned* out = static_cast<unsigned*>(out_rows);
  float columns[16], products[2] = {0.f, 0.f};
  const float gates[2] = {opaque(rows[kGate]), opaque(rows[kGate + 1])};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = i & 1, row = first_row(tid) + 8 * r, column = 8 * (i >> 1) + 2 * (tid & 3);
    const float gate = gates[r], beta = -rows[kBeta + r];
    const float x = exp2_fast(gate - g[column]) * n[2 * i], y = exp2_fast(gate - g[column + 1]) * n[2 * i + 1];
    const float x_kept = row > column ? x : 0.f, y_kept = row > column + 1 ? y : 0.f;
    out[i] = qla_pack<HALF>(beta * x_kept, beta * y_kept);
    const float x_moved = x_kept * kk[2 * i], y_moved = y_kept * kk[2 * i + 1];
    products[r] -= x_moved + y_moved;
    columns[i & ~1] = r == 0 ? beta * x_moved : fmaf(beta, x_moved, columns[i & ~1]);
    columns[i | 1] = r == 0 ? beta * y_moved : fmaf(beta, y_moved, columns[i | 1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[kBetas + r] += products[r];
    sums[kReads + r] = fmaf(rows[kBeta + r], products[r], sums[kReads + r]);
  }
  store_columns(columns, out_sums + kInverseColumns, tid);
  return 0;
}

// a thread's sums of its two rows, over the four lanes that share them, to shared memory
__device__ __forceinline__ void store_rows_sums(float* sums, float* out, int tid) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[r] += __shfl_xor_sync(kAll, sums[r], 1);
    sums[r] += __shfl_xor_sync(kAll, sums[r], 2);
    if ((tid & 3) == 0) out[first_row(tid) + 8 * r] = sums[r];
  }
}
__device__ __forceinline__ int store_query_sums(float* sums, float* out, int tid) {
  tid = opaque(tid);
  store_rows_sums(sums + kReads, out + kQueryReads, tid);
  store_rows_sums(sums + kBetas, out + kQueryBetas, tid);
  return 0;
}
__device__ __forceinline__ int store_key_sums(float* sums, float* out, int tid) {
  tid = opaque(tid);
  store_rows_sums(sums + kWrites, out + kKeyWrites, tid);
  store_rows_sums(sums + kReads, out + kKeyReads, tid);
  store_rows_sums(sums + kBetas, out + kKeyBetas, tid);
  return 0;
}

// ------------------------------------------------------------------------------------------------ the IO warps

// Unit `index` is a (chunk slot, key head); rows as qla_find_chunk gives them. `unit`: rows, first row, key head, sequence to search from.
__device__ __forceinline__ int find_unit(int index, int key_heads, const int* cu, int num_seqs, int seq_len, int tokens, int* unit, int lane) {
  const int slot = index / key_heads;
  const QlaChunk chunk = qla_find_chunk(cu, num_seqs, seq_len, tokens, slot, unit[3], lane);
  unit[0] = chunk.rows;
  unit[1] = chunk.row0;
  unit[2] = index - slot * key_heads;
  return 0;
}

__device__ __forceinline__ int read_gates(const float* g, const float* beta, long long stride, int rows, float* g_s, float* beta_s, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const long long at = min(token, rows - 1) * stride;
    g_s[token] = g[at];
    beta_s[token] = token < rows ? beta[at] : 0.f;
  }
  return 0;
}

// Gates' and beta's gradients of one head from the sums. A gate t scales what tokens from t on read of the state before the chunk, what
// tokens before t leave in the state after it, that state's share of the first, and the pairs it stands between.
__device__ __forceinline__ int finish_gates(const float* sums, const float* g_s, float* dg, float* dbeta, long long stride, int rows,
                                            int lane) {
  float reads[2], writes[2], betas[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    float columns = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) columns += sums[kScoreColumns + 64 * w + t] + sums[kInverseColumns + 64 * w + t];
    reads[i] = sums[kQueryReads + t] + sums[kKeyReads + t] - columns;
    writes[i] = sums[kKeyWrites + t];
    betas[i] = sums[kQueryBetas + t] + sums[kKeyBetas + t] + sums[kValueBetas + t];
  }
  float dot = 0.f, from_here = reads[0] + reads[1], up_to_here = writes[0] + writes[1];
#pragma unroll
  for (int i = 0; i < 4; ++i) dot += sums[kDots + i];
  dot *= exp2_fast(g_s[63]);
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float after = __shfl_down_sync(kAll, from_here, d), before = __shfl_up_sync(kAll, up_to_here, d);
    if (lane + d < 32) from_here += after;
    if (lane >= d) up_to_here += before;
  }
  float after = __shfl_down_sync(kAll, from_here, 1), before = __shfl_up_sync(kAll, up_to_here, 1);
  if (lane == 31) after = 0.f;
  if (lane == 0) before = 0.f;
  const float values[2] = {from_here + before + dot, after + reads[1] + before + writes[0] + dot};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    if (t < rows) {
      dg[t * stride] = values[i];
      dbeta[t * stride] = betas[i];
    }
  }
  return 0;
}

// `count` rows of `bytes` bytes that lie `stride` bytes apart become zero; one warp
__device__ __forceinline__ int zero(void* out, int count, int bytes, long long stride, int lane) {
  char* at = static_cast<char*>(out);
  const int words = bytes >> 2;
  for (int i = lane; i < count * words; i += 32) reinterpret_cast<unsigned*>(at + (i / words) * stride)[i % words] = 0u;
  return 0;
}

}  // namespace qla_bwd
