// Numbers of any dtype at an address that may be absent (0), offsets of packed sequences of either width, quads, and the gate's activation.
// Kinds of numbers are those of recurrent.py.
namespace qla_recurrent {
enum Kind { kFloat32, kBfloat16, kFloat16 };

// row * stride + first, of numbers that are not negative: one instruction
static __device__ __forceinline__ long long index(int row, int stride, int first) {
  return (long long)((unsigned long long)(unsigned)row * (unsigned)stride + (unsigned)first);
}

// Numbers of any kind at an address, or 0 where there is none
static __device__ __forceinline__ int log_bytes(int kind) { return kind == kFloat32 ? 2 : 1; }
static __device__ __forceinline__ long long number_at(long long array, int kind, long long i) {
  return array == 0 ? 0 : array + (i << log_bytes(kind));
}

// The number that is a row's, in the first word or in the second: two loads of one register would wait for each other. What asks for a load
// ahead of time must not wait for it, so it is not converted.
static __device__ __forceinline__ int fetch_number(unsigned* to, long long address, int kind, int row, int stride) {
  const long long at = address + index(row, stride, 0);
  to[0] = to[1] = 0;
  if (address != 0 && kind == kFloat32) to[0] = __ldg(reinterpret_cast<const unsigned*>(at));
  if (address != 0 && kind != kFloat32) to[1] = __ldg(reinterpret_cast<const unsigned short*>(at));
  return 0;
}
static __device__ __forceinline__ float number(unsigned wide, unsigned bits, int kind) {
  float d;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(d) : "r"(bits));
  return kind == kFloat16 ? d : __uint_as_float(kind == kBfloat16 ? bits << 16 : wide);
}
static __device__ __forceinline__ float read(long long array, int kind, long long i) {
  unsigned words[2];
  fetch_number(words, number_at(array, kind, i), kind, 0, 0);
  return number(words[0], words[1], kind);
}

// Some lanes read a token's numbers together: the log gate, A_log, dt_bias, and from the fifth to the eighth beta, of all columns or of one
// each.
static __device__ __forceinline__ long long array_of_lane(int b, long long g, long long a_log, long long dt_bias, long long beta) {
  const long long of_gate = b == 0 ? g : b == 1 ? a_log : b == 2 ? dt_bias : 0;
  return b >= 4 && b < 8 ? beta : of_gate;
}
template <int LANES> static __device__ __forceinline__ float of_lane(float x, int b) { return __shfl_sync(0xffffffffu, x, b, LANES); }

// One of two sums over a lane and the one that differs from it in `lane`: the second in the upper one.
static __device__ __forceinline__ float halved(float first, float second, bool upper, int lane) {
  const float kept = upper ? second : first, sent = upper ? first : second;
  return kept + __shfl_xor_sync(0xffffffffu, sent, lane);
}

// A value of cu_seqlens, whatever it is, as a row between 0 and tokens.
static __device__ __forceinline__ int offset(long long cu, int wide, int i, int tokens) {
  const long long x = wide ? __ldg(reinterpret_cast<const long long*>(cu) + i) : (long long)__ldg(reinterpret_cast<const int*>(cu) + i);
  return (int)min(max(x, 0ll), (long long)tokens);
}

// x, worked out here and nowhere else: the compiler would work it out anew for every use that is predicated or far away
static __device__ __forceinline__ long long once(long long x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Address of quad i. Loads and stores take what is further on.
template <typename T> static __device__ __forceinline__ long long quad_at(const T* array, long long i) {
  return once(reinterpret_cast<long long>(array) + (long long)(4 * sizeof(T)) * i);
}

// Quads of states, each read and written once; hints that no cache need keep them (ld.cs, st.cs) made large batches slower. Into registers
// n to n + 3, zeros where nothing is wanted.
static __device__ __forceinline__ int load_state(float* to, int n, long long first, int further, bool wanted) {
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (wanted) x = __ldg(reinterpret_cast<const float4*>(first) + further);
  to[n] = x.x, to[n + 1] = x.y, to[n + 2] = x.z, to[n + 3] = x.w;
  return 0;
}
static __device__ __forceinline__ int store_state(const float* from, int n, long long first, int further, bool wanted) {
  if (wanted) reinterpret_cast<float4*>(first)[further] = make_float4(from[n], from[n + 1], from[n + 2], from[n + 3]);
  return 0;
}

// Quads of q and k, elements of v and o, of 2 or 4 bytes each. Read ahead of time they stay as they are: converted, they would be waited
// for.
template <int BYTES> struct Quad;
template <> struct Quad<2> { using Word = uint2; };
template <> struct Quad<4> { using Word = uint4; };
template <int BYTES> static __device__ __forceinline__ int load_quad(unsigned* to, int n, long long first, int further, bool wanted) {
  using Word = typename Quad<BYTES>::Word;
  Word x = {};
  if (wanted) x = __ldg(reinterpret_cast<const Word*>(first) + further);
  reinterpret_cast<Word*>(to)[n] = x;
  return 0;
}
template <typename T> static __device__ __forceinline__ int load_one(unsigned* to, const T* from, long long i, bool wanted) {
  to[0] = 0;
  if (wanted && sizeof(T) == 4) to[0] = __ldg(reinterpret_cast<const unsigned*>(from) + i);
  if (wanted && sizeof(T) == 2) to[0] = __ldg(reinterpret_cast<const unsigned short*>(from) + i);
  return 0;
}
template <typename T> static __device__ __forceinline__ int store_one(T* to, long long i, float x, bool wanted) {
  if (wanted) to[i] = T(x);
  return 0;
}
template <int KIND> static __device__ __forceinline__ int widen(const unsigned* from, float* to, int count) {
#pragma unroll
  for (int n = 0; n < count; ++n) {
    if constexpr (KIND == kFloat32) {
      to[n] = __uint_as_float(from[n]);
    } else {
      const float2 pair = qla_unpack<KIND == kFloat16>(from[n / 2]);
      to[n] = n % 2 ? pair.y : pair.x;
    }
  }
  return 0;
}

static __device__ __forceinline__ float sigmoid(float x, float factor) { return __fdividef(factor, 1.f + expf(-x)); }
// -exp(A_log) softplus(x); beyond 20 softplus(x) is x in fp32, and exp may not overflow
static __device__ __forceinline__ float activated(float x, float a_log) { return -expf(a_log) * (x > 20.f ? x : log1pf(expf(x))); }
}  // namespace qla_recurrent
