// Device code of kkt_solve.py: everything a unit does besides TMA, wgmma and barriers, which stay in TileLang.
// A unit is one chunk of up to 64 tokens and up to four neighbouring value heads hv, hv + 1, ...; warp w owns head hv + w.
// lane = 4 * g + t in the usual mma fragment notation: a thread holds rows g, g + 8 and columns 2t, 2t + 1 (+ 8) of a 16x16 block.
namespace qla_kkt {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kChunk = 64;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kGateFloor = -256.f;  // log2 units: 2^-256 is 0 in fp32, and sums of 64 such gates stay finite

// One K K^T slot: 4 diagonal 16x16 blocks in fp32, then the bf16 high and low parts of the 6 blocks below the diagonal.
// The 16 pad floats after each diagonal block put the two blocks that a warp reads at once into different banks.
constexpr int kDiagFloats = 16 * 16 + 16;
constexpr int kHigh = 4 * kDiagFloats * 4;  // byte offsets
constexpr int kBlock = 16 * 16 * 2;
constexpr int kLow = kHigh + 6 * kBlock;
constexpr int kSlot = kLow + 6 * kBlock;
constexpr int kDiagLow = 4 * kBlock;  // from the high to the low parts of the inverted diagonal blocks
__host__ __device__ constexpr int lower_block(int row, int col) { return row * (row - 1) / 2 + col; }

// Unit record in shared memory, 12 integers; kkt_solve.py names the same fields.
enum Field { kRows, kRow0, kHead, kKey, kKeys, kPhase, kIndex, kSeq, kChunkSlot };

// ------------------------------------------------------------------------------------------------ finding a unit's tokens

// Writes the record of the first unit at or after `index` (in steps of `stride`) that has rows; rows = 0 says that none is left.
// One warp calls it. `seq` is a sequence at or before the unit's own, `phase` the number of key loads before the unit.
__device__ __forceinline__ void find_unit(int* unit, int index, int seq, int phase, const int* cu, int tokens, int value_heads, int ratio,
                                          int num_seqs, int seq_len, int stride) {
  const int lane = threadIdx.x & 31;
  const int groups = (value_heads + 3) / 4;
  const int slots_per_seq = (seq_len + 63) >> 6;
  const int slots = seq_len > 0 ? num_seqs * slots_per_seq : (tokens >> 6) + num_seqs + 1;
  int rows = 0, row0 = 0, head = 0, slot = 0;
  for (; rows == 0 && index < slots * groups; index += stride) {
    slot = index / groups;
    head = (index - slot * groups) * 4;
    const QlaChunk chunk = qla_find_chunk(cu, num_seqs, seq_len, tokens, slot, seq, lane);
    row0 = chunk.row0;
    rows = chunk.rows;
  }
  if (lane == 0) {
    const int key = head / ratio, last = min(head + 3, value_heads - 1);
    int4* out = reinterpret_cast<int4*>(unit);
    out[0] = make_int4(rows, row0, head, key);
    out[1] = make_int4(last / ratio - key + 1, phase, index, seq);  // index: already the next one to look at
    unit[kChunkSlot] = slot;
  }
}

// The record after `unit`; a unit with keys loads them in one step or, past `tiles` key heads, in two.
__device__ __forceinline__ void next_unit(int* next, const int* unit, int tiles, const int* cu, int tokens, int value_heads, int ratio,
                                          int num_seqs, int seq_len, int stride) {
  const int steps = unit[kRows] < 0 ? 0 : unit[kKeys] > tiles ? 2 : 1;
  find_unit(next, unit[kIndex], unit[kSeq], unit[kPhase] + steps, cu, tokens, value_heads, ratio, num_seqs, seq_len, stride);
}

// ------------------------------------------------------------------------------------------------ gates

// Warp 0 reads g, warp 1 beta: lane l takes tokens 2l and 2l + 1 of all four heads, 16 bytes each where `wide` allows (value_heads % 4
// == 0, aligned bases). Loading four bytes a lane with stride value_heads, each warp its own head, was slower: more sectors.
// Rows past the end and missing heads give 0.
__device__ __forceinline__ void load_gates(const float* g, const float* beta, float* x, const int* unit, int value_heads, int wide) {
  const int tid = threadIdx.x, row = 2 * (tid & 31), rows = unit[kRows];
  if (tid >= 64 || rows <= 0) return;
  const float* p = (tid < 32 ? g : beta) + ((long long)(unit[kRow0] + row) * value_heads + unit[kHead]);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = 0.f;
  if (wide) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row + i < rows) {
        const float4 v = *reinterpret_cast<const float4*>(p + (long long)i * value_heads);
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
      }
  } else {
    const int heads = value_heads - unit[kHead];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 4; ++h)
        if (row + i < rows && h < heads) x[4 * i + h] = p[(long long)i * value_heads + h];
  }
}

// Warp 0 turns its gates into cumulative sums in log2 units and stores them; both warps leave their values in gates[head][g, beta][64].
__device__ __forceinline__ void finish_gates(float* x, float* g_cum, float* gates, const int* unit, int value_heads, int wide) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (warp >= 2) return;
  if (warp == 0) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= kLog2e;
      x[i] = x[i] < kGateFloor ? kGateFloor : x[i];  // a comparison, so that NaN passes
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) sum[h] = x[h] + x[4 + h];
#pragma unroll
    for (int d = 1; d < 32; d <<= 1)
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float before = __shfl_up_sync(kAll, sum[h], d);
        if (lane >= d) sum[h] += before;
      }
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float before = __shfl_up_sync(kAll, sum[h], 1);
      x[h] += lane > 0 ? before : 0.f;
      x[4 + h] = sum[h];
    }
    const int rows = unit[kRows], row = 2 * lane;
    float* p = g_cum + ((long long)(unit[kRow0] + row) * value_heads + unit[kHead]);
    if (wide) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (row + i < rows)
          *reinterpret_cast<float4*>(p + (long long)i * value_heads) = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    } else {
      const int heads = value_heads - unit[kHead];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 4; ++h)
          if (row + i < rows && h < heads) p[(long long)i * value_heads + h] = x[4 * i + h];
    }
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) *reinterpret_cast<float2*>(gates + h * 128 + warp * 64 + 2 * lane) = make_float2(x[h], x[4 + h]);
}

// ------------------------------------------------------------------------------------------------ bf16 pairs and 16x16 products

struct Pair {  // a 16x16 operand as a sum of two bf16 blocks
  unsigned hi[4], lo[4];
};

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ unsigned pack_bf16(float x, float y) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
  return d;
}
__device__ __forceinline__ unsigned pack_f16(float x, float y) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
  return d;
}
__device__ __forceinline__ float low_half(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

// bf16 for fp16 tensors as well: products of keys that are not normalised can pass 65504.
__device__ __forceinline__ void split(float x, float y, unsigned& hi, unsigned& lo) {
  hi = pack_bf16(x, y);
  lo = pack_bf16(x - low_half(hi), y - high_half(hi));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void load_block(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_block_t(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_block(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ __forceinline__ void mma(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b, without the product of the two low parts (2^-16 of the result); small terms first
__device__ __forceinline__ void multiply_add(float (&d)[8], const Pair& a, const Pair& b) {
  mma(d, a.lo, b.hi[0], b.hi[1]);
  mma(d + 4, a.lo, b.hi[2], b.hi[3]);
  mma(d, a.hi, b.lo[0], b.lo[1]);
  mma(d + 4, a.hi, b.lo[2], b.lo[3]);
  mma(d, a.hi, b.hi[0], b.hi[1]);
  mma(d + 4, a.hi, b.hi[2], b.hi[3]);
}

// ------------------------------------------------------------------------------------------------ K K^T to shared memory

// Clears rows and columns past the end of the sequence; a select, because what the tile holds there may be NaN.
__device__ __forceinline__ void mask_tail(float* acc, int rows) {
  const int tid = threadIdx.x, row = (tid >> 5) * 16 + ((tid & 31) >> 2), col = 2 * (tid & 3);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const bool keep = row + (i & 2) * 4 < rows && col + (i >> 2) * 8 + (i & 1) < rows;
    acc[i] = keep ? acc[i] : 0.f;
  }
}

// The wgmma accumulator (warp w owns rows 16w .. 16w + 15) into one slot. Quads of a diagonal row and halves of a lower block's row are
// swapped by row so that neither these stores nor the loads of solve_head meet in a bank.
__device__ __forceinline__ void store_kk(const float* acc, void* slot) {
  const int w = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* block = acc + 8 * j;
    if (j < w) {
      char* p = (char*)slot + kHigh + lower_block(w, j) * kBlock + g * 32 + t * 4;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned hi, lo;
          split(block[4 * n + 2 * half], block[4 * n + 2 * half + 1], hi, lo);
          char* q = p + half * 256 + (n ^ (g >> 2)) * 16;
          *reinterpret_cast<unsigned*>(q) = hi;
          *reinterpret_cast<unsigned*>(q + kLow - kHigh) = lo;
        }
    } else if (j == w) {
      float* p = (float*)slot + w * kDiagFloats + g * 16 + 2 * (t & 1);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(p + half * 128 + ((2 * n + (t >> 1)) ^ ((g >> 1) & 3)) * 4) =
              make_float2(block[4 * n + 2 * half], block[4 * n + 2 * half + 1]);
    }
  }
}

// ------------------------------------------------------------------------------------------------ the inverse of one head by one warp

// D_b = (I + StrictLower(diag(beta) K K^T))^-1 of the four diagonal blocks by forward substitution: lane l has column l % 16 of blocks
// l / 16 and l / 16 + 2 in registers. K K^T is symmetric, so step j reads row j (one address for 16 lanes) and updates all later entries.
// Leaves D_b^T, row = column of D_b, as bf16 pairs in `stage`.
__device__ __forceinline__ void invert_diagonal(const float* kk, const float* beta, char* stage, int lane) {
  const int col = lane & 15, half = lane >> 4;
  const float* rows = kk + half * kDiagFloats;
  float x[2][16];
  float4 bv[2];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[0][i] = x[1][i] = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j % 4 == 0) {
      bv[0] = *reinterpret_cast<const float4*>(beta + half * 16 + j);
      bv[1] = *reinterpret_cast<const float4*>(beta + half * 16 + 32 + j);
    }
    const float unit = j == col ? 1.f : 0.f;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const float b = j % 4 == 0 ? bv[p].x : j % 4 == 1 ? bv[p].y : j % 4 == 2 ? bv[p].z : bv[p].w;
      const float xj = fmaf(-b, x[p][j], unit);
      x[p][j] = xj;
#pragma unroll
      for (int q = j / 4; q < 4; ++q) {
        if (4 * q + 3 == j) continue;
        const float4 v = *reinterpret_cast<const float4*>(rows + p * 2 * kDiagFloats + j * 16 + 4 * (q ^ ((j >> 1) & 3)));
        if (4 * q + 0 > j) x[p][4 * q + 0] = fmaf(v.x, xj, x[p][4 * q + 0]);
        if (4 * q + 1 > j) x[p][4 * q + 1] = fmaf(v.y, xj, x[p][4 * q + 1]);
        if (4 * q + 2 > j) x[p][4 * q + 2] = fmaf(v.z, xj, x[p][4 * q + 2]);
        if (4 * q + 3 > j) x[p][4 * q + 3] = fmaf(v.w, xj, x[p][4 * q + 3]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < 2; ++p)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      unsigned hi[4], lo[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) split(x[p][8 * q + 2 * e], x[p][8 * q + 2 * e + 1], hi[e], lo[e]);
      char* d = stage + (half + 2 * p) * kBlock + col * 32 + (q ^ ((col >> 2) & 1)) * 16;
      *reinterpret_cast<uint4*>(d) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
      *reinterpret_cast<uint4*>(d + kDiagLow) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
  __syncwarp();
}

// Block (b, j) of A diag(beta) as an operand: beta belongs to the columns.
__device__ __forceinline__ Pair times_beta(const float (&v)[8], const float* beta, int j, int t) {
  const float2 p = *reinterpret_cast<const float2*>(beta + 16 * j + 2 * t), q = *reinterpret_cast<const float2*>(beta + 16 * j + 8 + 2 * t);
  Pair r;
  split(v[0] * p.x, v[1] * p.y, r.hi[0], r.lo[0]);
  split(v[2] * p.x, v[3] * p.y, r.hi[1], r.lo[1]);
  split(v[4] * q.x, v[5] * q.y, r.hi[2], r.lo[2]);
  split(v[6] * q.x, v[7] * q.y, r.hi[3], r.lo[3]);
  return r;
}

// Block (b, j) of Gamma * A, rounded. Above the diagonal exp2 may be infinite, so zeros are selected after the product.
template <bool kHalf>
__device__ __forceinline__ void gate_block(unsigned (&out)[4], const float (&v)[8], const float* g_cum, int b, int j, int g, int t) {
  const float r0 = g_cum[16 * b + g], r1 = g_cum[16 * b + 8 + g];
  const float2 p = *reinterpret_cast<const float2*>(g_cum + 16 * j + 2 * t), q = *reinterpret_cast<const float2*>(g_cum + 16 * j + 8 + 2 * t);
  const float d[8] = {r0 - p.x, r0 - p.y, r1 - p.x, r1 - p.y, r0 - q.x, r0 - q.y, r1 - q.x, r1 - q.y};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = v[i] * exp2_fast(d[i]);
    if (b == j) x[i] = g + (i & 2) * 4 >= 2 * t + (i >> 2) * 8 + (i & 1) ? x[i] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = kHalf ? pack_f16(x[2 * i], x[2 * i + 1]) : pack_bf16(x[2 * i], x[2 * i + 1]);
}

// Slot of the warp's key head: of a double buffer if all four heads share it, else the first or second of the unit's span.
__device__ __forceinline__ int kk_slot(const int* unit, int ratio, int buffer) {
  return ratio % 4 == 0 ? buffer : unit[kHead] + (int)(threadIdx.x >> 5) >= (unit[kKey] + 1) * ratio;
}

// Gamma * A of one head into `stage`, 64 rows of 128 bytes, 16-byte pieces swapped by row & 7 as the TMA store expects.
// From A (I + N) = I: A_bj = -(sum over c = j + 1 .. b of A_bc beta_c KK_cj) D_j. Row blocks b are independent, and an accumulator
// becomes the next left operand without leaving registers. The D_b live in rows 0 .. 31 of `stage`, so finished blocks of these rows wait
// in registers until all of D has been read.
template <bool kHalf>
__device__ __forceinline__ void solve_head(const void* kk_, int slot, const float* gates, void* stage_) {
  const int warp = threadIdx.x >> 5;
  const char* kk = (const char*)kk_ + slot * kSlot;
  char* stage = (char*)stage_ + warp * 8192;
  const float* g_cum = gates + warp * 128;
  const float* beta = g_cum + 64;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, m = lane >> 3, r = lane & 7;
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the previous unit's store still reads `stage`
  __syncwarp();
  invert_diagonal((const float*)kk, beta, stage, lane);

  // ldmatrix rows of this lane: of D (stored transposed) and of the lower blocks of K K^T
  const unsigned d_at = shared_address(stage) + (r + (m >> 1) * 8) * 32 + ((m & 1) ^ (r >> 2)) * 16;
  const unsigned kk_at = shared_address(kk) + kHigh + (r + (m & 1) * 8) * 32 + ((m >> 1) ^ (r >> 2)) * 16;
  const unsigned out_at = shared_address(stage) + (r + (m & 1) * 8) * 128;
  auto out = [&](int b, int j) { return out_at + b * 2048 + ((2 * j + (m >> 1)) ^ r) * 16; };
  const unsigned zero[4] = {0u, 0u, 0u, 0u};

  Pair a[4][4];          // A_bj diag(beta_j), j > 0
  unsigned held[3][4];   // blocks (0,0), (1,0), (1,1) of the result
  auto emit = [&](const float(&v)[8], int b, int j) {
    unsigned x[4];
    gate_block<kHalf>(x, v, g_cum, b, j, g, t);
    if (b < 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) held[b + j][i] = x[i];
    } else {
      store_block(out(b, j), x);
    }
  };

#pragma unroll
  for (int b = 0; b < 4; ++b) {
    Pair d;
    float v[8];
    load_block_t(d.hi, d_at + b * kBlock);
    load_block_t(d.lo, d_at + kDiagLow + b * kBlock);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = low_half(d.hi[i]) + low_half(d.lo[i]);
      v[2 * i + 1] = high_half(d.hi[i]) + high_half(d.lo[i]);
    }
    if (b > 0) a[b][b] = times_beta(v, beta, b, t);
    emit(v, b, b);
  }
  store_block(out(2, 3), zero);

#pragma unroll
  for (int j = 2; j >= 0; --j) {
    float sum[4][8];
#pragma unroll
    for (int b = j + 1; b < 4; ++b)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[b][i] = 0.f;
#pragma unroll
    for (int c = 3; c > j; --c) {
      Pair n;
      load_block_t(n.hi, kk_at + lower_block(c, j) * kBlock);
      load_block_t(n.lo, kk_at + kLow - kHigh + lower_block(c, j) * kBlock);
#pragma unroll
      for (int b = c; b < 4; ++b) multiply_add(sum[b], a[b][c], n);
    }
    Pair d;
    load_block(d.hi, d_at + j * kBlock);
    load_block(d.lo, d_at + kDiagLow + j * kBlock);
#pragma unroll
    for (int b = j + 1; b < 4; ++b) {
      Pair s;
      float v[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) split(-sum[b][2 * i], -sum[b][2 * i + 1], s.hi[i], s.lo[i]);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = 0.f;
      multiply_add(v, s, d);
      if (j > 0) a[b][j] = times_beta(v, beta, j, t);
      emit(v, b, j);
    }
  }
  __syncwarp();  // all of D has been read

  store_block(out(0, 0), held[0]);
  store_block(out(1, 0), held[1]);
  store_block(out(1, 1), held[2]);
#pragma unroll
  for (int j = 1; j < 4; ++j) store_block(out(0, j), zero);
#pragma unroll
  for (int j = 2; j < 4; ++j) store_block(out(1, j), zero);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------ how fast a state is forgotten

// log2 of a bound on the norm of a chunk's transition, the product of its tokens' exp(g) (I - beta k k^T): the second factor has the
// eigenvalues 1 and 1 - beta k^2. A head a warp, two tokens a lane. Rows past the end have beta = 0 and count nothing.
__device__ __forceinline__ void store_bound(const void* kk_, int slot, const float* gates, float* bound, const int* unit, int value_heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane & 15;
  const float* kk = (const float*)((const char*)kk_ + slot * kSlot);
  const float* g_cum = gates + warp * 128;
  float factor[2], sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float squared = kk[(token >> 4) * kDiagFloats + r * 16 + ((r >> 2) ^ ((r >> 1) & 3)) * 4 + (r & 3)];
    factor[i] = fabsf(1.f - g_cum[64 + token] * squared);
  }
  if (!__all_sync(kAll, factor[0] <= 1.f && factor[1] <= 1.f)) {  // not with normalised keys and beta of at most 2; NaN passes
    for (int i = 0; i < 2; ++i) sum += factor[i] <= 1.f ? 0.f : __log2f(factor[i]);
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kAll, sum, d);
  }
  if (lane == 0) bound[(long long)unit[kChunkSlot] * value_heads + unit[kHead] + warp] = sum + g_cum[63];
}

// ------------------------------------------------------------------------------------------------ stores that are not TMA

// The first rows of a chunk that is not whole: a TMA store would overwrite the next sequence.
__device__ __forceinline__ void store_tail(const void* stage_, void* A, const int* unit, int value_heads) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, piece = lane & 7, rows = unit[kRows];
  if (unit[kHead] + warp >= value_heads) return;
  const char* stage = (const char*)stage_ + warp * 8192;
  char* out = (char*)A + ((long long)unit[kRow0] * value_heads + unit[kHead] + warp) * 128 + piece * 16;
  for (int row = lane >> 3; row < rows; row += 4)
    *reinterpret_cast<uint4*>(out + (long long)row * value_heads * 128) =
        *reinterpret_cast<const uint4*>(stage + row * 128 + (piece ^ (row & 7)) * 16);
}

// Rows that no sequence owns: zero A, g_cum and o for the unit's heads, which lie side by side in each row.
__device__ __forceinline__ void zero_rows(void* A, float* g_cum, void* o, const int* unit, int value_heads, int value_dim) {
  const int heads = min(4, value_heads - unit[kHead]), rows = -unit[kRows];
  const long long first = (long long)unit[kRow0] * value_heads + unit[kHead];
  for (int row = threadIdx.x >> 5; row < rows; row += 4) {
    const long long at = first + (long long)row * value_heads;
    for (int i = threadIdx.x & 31; i < heads * (value_dim / 8); i += 32) {
      reinterpret_cast<uint4*>((char*)o + at * (2 * value_dim))[i] = make_uint4(0, 0, 0, 0);
      if (i < heads * 8) reinterpret_cast<uint4*>((char*)A + at * 128)[i] = make_uint4(0, 0, 0, 0);
      if (i < heads) g_cum[at + i] = 0.f;
    }
  }
}

__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace qla_kkt
