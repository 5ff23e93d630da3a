// Numbers of any dtype at an address that may be absent (0), offsets of packed sequences of either width, and the gate's activation.
// Kinds of numbers are those of recurrent.py.
namespace qla_recurrent {
enum Kind { kFloat32, kBfloat16, kFloat16 };

// The bits of element i, 0 where there is no array: what asks for a load ahead of time must not wait for it, so they are not converted.
static __device__ __forceinline__ unsigned bits(long long address, int kind, long long i) {
  if (address == 0) return 0;
  if (kind == kFloat32) return __ldg(reinterpret_cast<const unsigned*>(address) + i);
  return __ldg(reinterpret_cast<const unsigned short*>(address) + i);
}
static __device__ __forceinline__ float number(unsigned bits, int kind) {
  if (kind == kFloat32) return __uint_as_float(bits);
  if (kind == kBfloat16) return __uint_as_float(bits << 16);
  float d;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(d) : "r"(bits));
  return d;
}
static __device__ __forceinline__ float read(long long address, int kind, long long i) { return number(bits(address, kind, i), kind); }

// A value of cu_seqlens, whatever it is, as a row between 0 and tokens.
static __device__ __forceinline__ int offset(long long cu, int wide, int i, int tokens) {
  const long long x = wide ? __ldg(reinterpret_cast<const long long*>(cu) + i) : (long long)__ldg(reinterpret_cast<const int*>(cu) + i);
  return (int)min(max(x, 0ll), (long long)tokens);
}

// x, in such a way that what was worked out from it before is not kept in registers until it is needed again
static __device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 16 bytes at once: the compiler takes a float4 that it copies from an array apart
static __device__ __forceinline__ int store_quad(float* to, long long i, float x, float y, float z, float w) {
  reinterpret_cast<float4*>(to)[i] = make_float4(x, y, z, w);
  return 0;
}

// -exp(A_log) softplus(x), given exp(A_log); beyond 20 softplus(x) is x in fp32, and exp may not overflow
static __device__ __forceinline__ float activated(float x, float exp_a) { return -exp_a * (x > 20.f ? x : log1pf(expf(x))); }
}  // namespace qla_recurrent
