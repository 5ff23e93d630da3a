"""A kernel's generated code on a CPU: compiled by g++, the threads of a block as fibers that meet at shuffles and barriers.

For kernels without tensor cores and without asynchronous copies. What runs is the text that nvcc gets, with stand-ins for the few CUDA
words in it and for the shared device functions that are PTX. All threads of a warp have to come to a shuffle, and all of a block to a
barrier.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from qla.kernels import ws
from tests.lowered import generated

COMPILER = shutil.which("g++")

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
using std::max; using std::min;
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
typedef unsigned uint;
typedef unsigned char uchar;
typedef _Float16 half_t;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static int atomicAdd(int* p, int x) { const int old = *p; *p += x; return old; }
static int atomicOr(int* p, int x) { const int old = *p; *p |= x; return old; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned x) { float d; std::memcpy(&d, &x, 4); return d; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename T> static T __ldg(const T* p) { return *p; }
template <typename T> static T __ldcs(const T* p) { return *p; }
template <typename T> static void __stcs(T* p, T x) { *p = x; }
static float __fdividef(float x, float y) { return x / y; }
static unsigned rounded_to_bfloat16(float x) { unsigned u; std::memcpy(&u, &x, 4); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
struct bfloat16_t {
  unsigned short bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) { bits = rounded_to_bfloat16(x); }
  operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
static unsigned rounded_to_half(float x) { half_t h = (half_t)x; unsigned short s; std::memcpy(&s, &h, 2); return s; }
static float widened_half(unsigned x) { unsigned short s = x; half_t h; std::memcpy(&h, &s, 2); return h; }
// of ws.cuh
template <bool HALF> static unsigned qla_pack(float x, float y) {
  return HALF ? rounded_to_half(x) | rounded_to_half(y) << 16 : rounded_to_bfloat16(x) | rounded_to_bfloat16(y) << 16;
}
template <bool HALF> static float2 qla_unpack(unsigned x) {
  if (HALF) return make_float2(widened_half(x & 0xffff), widened_half(x >> 16));
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim;
constexpr int kMost = 1024;  // threads of a block
static ucontext_t scheduler, fibers[kMost];
static float slots[kMost / 32][2][32];
static int round_of[kMost];
static bool done[kMost], at_barrier[kMost];
static void yield() {
  const int thread = threadIdx.x;
  swapcontext(&fibers[thread], &scheduler);
  threadIdx.x = thread;
}
static float from_lane(float v, int lane) {
  const int thread = threadIdx.x, turn = round_of[thread]++ & 1;
  slots[thread / 32][turn][thread % 32] = v;
  yield();
  return slots[thread / 32][turn][lane];
}
static float __shfl_xor_sync(unsigned, float v, int delta, int = 32) { return from_lane(v, (threadIdx.x % 32) ^ delta); }
static float __shfl_sync(unsigned, float v, int lane, int width) { return from_lane(v, threadIdx.x % 32 / width * width + lane); }
static void __syncthreads() {
  at_barrier[threadIdx.x] = true;
  yield();
}
"""

DRIVER = r"""
static const void** arguments;
static void thread_main() {
  KERNEL_CALL;
  done[threadIdx.x] = true;
}
static void run_block(int threads, std::vector<char>& stacks) {
  for (int thread = 0; thread < threads; ++thread) {
    getcontext(&fibers[thread]);
    fibers[thread].uc_stack.ss_sp = stacks.data() + ((size_t)thread << 16);
    fibers[thread].uc_stack.ss_size = 1 << 16;
    fibers[thread].uc_link = &scheduler;
    makecontext(&fibers[thread], thread_main, 0);
    done[thread] = at_barrier[thread] = false;
    round_of[thread] = 0;
  }
  for (bool left = true; left;) {
    left = false;
    bool all_wait = true;
    for (int thread = 0; thread < threads; ++thread)
      if (!done[thread] && !at_barrier[thread]) {
        all_wait = false;
        threadIdx.x = thread;
        swapcontext(&scheduler, &fibers[thread]);
      }
    if (all_wait)
      for (int thread = 0; thread < threads; ++thread) at_barrier[thread] = false;
    for (int thread = 0; thread < threads; ++thread) left |= !done[thread];
  }
}
extern "C" void launch(const void** given, int blocks_x, int blocks_y, int blocks_z, int threads) {
  arguments = given;
  blockDim.x = threads;
  std::vector<char> stacks((size_t)threads << 16);
  for (blockIdx.z = 0; blockIdx.z < blocks_z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < blocks_y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < blocks_x; ++blockIdx.x) run_block(threads, stacks);
}
"""

Values = Mapping[str, Any]


class Emulated:
    """A kernel of one config, called as its compiled function is.

    grid: blocks in x, y and z from the call's values, by the names of the kernel's parameters. sizes: the kernel's dynamic sizes likewise.
    """

    C_TYPES = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}

    def __init__(
        self,
        module: Any,
        cfg: Any,
        folder: Path,
        grid: Callable[[Values], tuple[int, int, int]],
        sizes: Callable[[Values], Values] = lambda v: {},
    ) -> None:
        self.threads, self.grid, self.sizes = cfg.threads, grid, sizes
        _, code = generated(module, cfg)
        head, body = re.fullmatch(r"__launch_bounds__\(\d+, \d+\) \w+\((.*?)\) (\{.*)", code, re.S).groups()
        self.parameters = [
            (re.sub(r"const|__restrict__", "", kind).strip(), name) for kind, name in re.findall(r"([^,]+?)\s*\b(\w+)(?:,|$)", head)
        ]
        self.by_call = [parameter.name.removesuffix("_handle") for parameter in module.prim_func(cfg).params]
        file = Path(module.__file__)
        shared = re.findall(r'device_source\(__file__, "(.*?)"\)', file.read_text())
        device = "\n".join(path.read_text() for path in (*map(file.with_name, shared), file.with_suffix(".cuh")))
        device = re.sub(r"float d;\s*asm\(.*?\);", "float d = widened_half(bits);", device, flags=re.S)
        passed = ", ".join(
            f"({kind})arguments[{i}]" if kind.endswith("*") else f"*({kind}*)arguments[{i}]" for i, (kind, _) in enumerate(self.parameters)
        )
        constants = re.findall(r"^constexpr .*;$", Path(ws.__file__).with_suffix(".cuh").read_text(), re.M)
        source = folder / f"{cfg.name}.cpp"
        source.write_text(
            "\n".join(
                [PRELUDE, *constants, device, f"static void kernel({head}) {body}", DRIVER.replace("KERNEL_CALL", f"kernel({passed})")]
            )
        )
        library = source.with_suffix(".so")
        command = [COMPILER, "-std=c++20", "-O0", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        self.launch = ctypes.CDLL(str(library)).launch

    def __call__(self, *arguments: object) -> None:
        values = dict(zip(self.by_call, arguments, strict=True))
        values |= self.sizes(values)
        kept, pointers = [], []
        for kind, name in self.parameters:
            value = values.get(name, 0)
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous() and value.data_ptr() % min(16, 4 * value.element_size()) == 0, name
                pointers.append(ctypes.c_void_p(value.data_ptr()))
            else:
                kept.append(self.C_TYPES[kind](value))
                pointers.append(ctypes.cast(ctypes.pointer(kept[-1]), ctypes.c_void_p))
        self.launch((ctypes.c_void_p * len(pointers))(*pointers), *self.grid(values), self.threads)
