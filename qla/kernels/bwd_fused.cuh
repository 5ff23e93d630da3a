// Device functions of bwd_fused.py: the elementwise work on wgmma accumulators [64, 64], and the ends of a chunk.
// `tid` counts within a warpgroup. A thread holds rows row(tid) and row(tid) + 8: element e belongs to row r = (e >> 1) & 1 of the two and to
// column 8 (e >> 2) + 2 (tid & 3) + (e & 1). Sums over a row are kept per thread and row, and put together once a head.
namespace qla_bwd {

constexpr unsigned kAll = 0xffffffffu;

// Fields of `rows`, what a thread knows of its two rows (x + r): gate and beta; and the chunk's last gate.
enum Row { kGate = 0, kBeta = 2, kLast = 4 };
// Fields of `sums`: gradients of gates by token that reads the state, by token that writes it, and of beta.
enum Sum { kReads = 0, kWrites = 2, kBetas = 4 };
// Sums of one warpgroup in shared memory: reads, writes, betas [64] each, then the columns' sums of each warp [4, 64].
constexpr int kSumsOfGroup = 7 * 64;

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

// sum of S * dS over a half of their elements, the first or the second, a part from each warp
template <bool HALF, int ELEMENTS>
__device__ __forceinline__ int dot_states(const void* s, const void* ds, int half, float* dots, int tid) {
  tid = opaque(tid);
  float sum = 0.f;
  s = static_cast<const char*>(s) + half * ELEMENTS;
  ds = static_cast<const char*>(ds) + half * ELEMENTS;
#pragma unroll 4
  for (int i = tid; i < ELEMENTS / 16; i += 128) {
    const uint4 x = static_cast<const uint4*>(s)[i], y = static_cast<const uint4*>(ds)[i];
    const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = qla_unpack<HALF>(xs[j]), b = qla_unpack<HALF>(ys[j]);
      sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kAll, sum, d);
  if ((tid & 31) == 0) dots[tid >> 5] = sum;
  return 0;
}

// W = diag(beta) V - diag(beta gamma) U takes V's place in the tile; V stays in registers
template <bool HALF>
__device__ __forceinline__ int make_w(const float* u, void* tile, const float* rows, unsigned* v_kept, int tid) {
  tid = opaque(tid);
  unsigned w[16];
  const float gamma[2] = {exp2_fast(opaque(rows[kGate])), exp2_fast(opaque(rows[kGate + 1]))};
  qla_load_plain(tile, v_kept, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 v = qla_unpack<HALF>(v_kept[i]);
    const float b = rows[kBeta + (i & 1)], bg = b * gamma[i & 1];
    w[i] = qla_pack<HALF>(b * v.x - bg * u[2 * i], b * v.y - bg * u[2 * i + 1]);
  }
  qla_store_plain(w, tile, tid);
  fence();
  return 0;
}

// diag(gamma_L / gamma) K dS, in place
__device__ __forceinline__ int scale_rest(float* acc, const float* rows) {
  const float last = opaque(rows[kLast]), rest[2] = {exp2_fast(last - rows[kGate]), exp2_fast(last - rows[kGate + 1])};
#pragma unroll
  for (int e = 0; e < 32; ++e) acc[e] *= rest[(e >> 1) & 1];
  return 0;
}

// what each token writes to the state: sum of Vd * (diag(gamma_L / gamma) K dS) over V
template <bool HALF>
__device__ __forceinline__ int finish_vd(const float* vd, const float* kds, float* sums, void* tile, int tid) {
  tid = opaque(tid);
  unsigned out[16];
#pragma unroll
  for (int e = 0; e < 32; ++e) sums[kWrites + ((e >> 1) & 1)] = fmaf(vd[e], kds[e], sums[kWrites + ((e >> 1) & 1)]);
  qla_round<HALF>(vd, out);
  qla_store_plain(out, tile, tid);
  fence();
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

// dW and dV = diag(beta) dW to their tiles; sums of dW * V over V, with dW as rounded: `add_read` takes the rest of beta's gradient from that
template <bool HALF>
__device__ __forceinline__ int finish_dw(const float* dw, const unsigned* v, const float* rows, float* sums, void* dw_tile, void* dv_tile,
                                         int tid) {
  tid = opaque(tid);
  unsigned out[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float beta = rows[kBeta + (i & 1)];
    out[i] = qla_pack<HALF>(beta * dw[2 * i], beta * dw[2 * i + 1]);
  }
  qla_store_plain(out, dv_tile, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    out[i] = qla_pack<HALF>(dw[2 * i], dw[2 * i + 1]);
    const float2 a = qla_unpack<HALF>(out[i]), b = qla_unpack<HALF>(v[i]);
    sums[kBetas + (i & 1)] = fmaf(a.x, b.x, fmaf(a.y, b.y, sums[kBetas + (i & 1)]));
  }
  qla_store_plain(out, dw_tile, tid);
  fence();
  return 0;
}

// dK += diag(gamma_L / gamma) (Vd dS^T)
__device__ __forceinline__ int add_written(float* dk, const float* acc, const float* rows) {
  const float last = opaque(rows[kLast]), rest[2] = {exp2_fast(last - rows[kGate]), exp2_fast(last - rows[kGate + 1])};
#pragma unroll
  for (int e = 0; e < 32; ++e) dk[e] = fmaf(rest[(e >> 1) & 1], acc[e], dk[e]);
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
  const float scaled[2] = {exp2_fast(rows[kGate] + log2_scale), exp2_fast(rows[kGate + 1] + log2_scale)};
  qla_load_plain(q_tile, q, tid);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 b = qla_unpack<HALF>(q[i]);
    const float x = scaled[i & 1] * acc[2 * i], y = scaled[i & 1] * acc[2 * i + 1];
    sums[kReads + (i & 1)] = fmaf(x, b.x, fmaf(y, b.y, sums[kReads + (i & 1)]));
    dq[2 * i] += x;
    dq[2 * i + 1] += y;
  }
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
                                           unsigned* out, float* sums, float* group_sums, int tid) {
  tid = opaque(tid);
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
  store_columns(columns, group_sums + 192, tid);
  return 0;
}

// P = s Lower(Gamma * Q K^T), transposed, to its tile
template <bool HALF>
__device__ __forceinline__ int make_p(const float* qk, const float* g, float log2_scale, void* tile, int tid) {
  tid = opaque(tid);
  unsigned out[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = first_row(tid) + 8 * (i & 1), column = 8 * (i >> 1) + 2 * (tid & 3);
    const float gate = g[row] + log2_scale;
    const float x = exp2_fast(gate - g[column]) * qk[2 * i], y = exp2_fast(gate - g[column + 1]) * qk[2 * i + 1];
    out[i] = qla_pack<HALF>(row >= column ? x : 0.f, row > column ? y : 0.f);
  }
  qla_store_transposed(out, tile, tid);
  fence();
  return 0;
}

// n = dW Vd^T. With Z = -StrictLower(Gamma * n): beta's gradient gains the rows of Z * K K^T, the gates' move by beta times that, and
// F = diag(beta) Z, rounded
template <bool HALF>
__device__ __forceinline__ int pair_inverse(const float* n, const float* kk, const float* g, const float* rows, unsigned* out, float* sums,
                                            float* group_sums, int tid) {
  tid = opaque(tid);
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
  store_columns(columns, group_sums + 192, tid);
  return 0;
}

// rows' sums of a warpgroup to shared memory; four lanes share a row
__device__ __forceinline__ int store_sums(float* sums, float* group_sums, int tid) {
  tid = opaque(tid);
  const int lane = tid & 31;
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    sums[i] += __shfl_xor_sync(kAll, sums[i], 1);
    sums[i] += __shfl_xor_sync(kAll, sums[i], 2);
    if ((lane & 3) == 0) group_sums[(i >> 1) * 64 + first_row(tid) + 8 * (i & 1)] = sums[i];
  }
  return 0;
}

// packed registers to one tile as they are and to another transposed
__device__ __forceinline__ int store_both(const unsigned* x, void* plain, void* transposed, int tid) {
  tid = opaque(tid);
  qla_store_plain(x, plain, tid);
  qla_store_transposed(x, transposed, tid);
  fence();
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
__device__ __forceinline__ int finish_gates(const float* sums, const float* dots, const float* g_s, float* dg, float* dbeta, long long stride,
                                            int rows, int lane) {
  float reads[2], writes[2], betas[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    const float *a = sums + t, *b = sums + kSumsOfGroup + t;
    float columns = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) columns += a[192 + 64 * w] + b[192 + 64 * w];
    reads[i] = a[0] + b[0] - columns;
    writes[i] = a[64] + b[64];
    betas[i] = a[128] + b[128];
  }
  float dot = 0.f, from_here = reads[0] + reads[1], up_to_here = writes[0] + writes[1];
#pragma unroll
  for (int i = 0; i < 8; ++i) dot += dots[i];
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
