"""What the VALUES role of bwd_fused does with V, dW and the states, on a CPU: every head size, chunks that are whole and that are not."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")
from qla.kernels import bwd_fused, ws  # noqa: E402
from tests.emulated import COMPILER, DRIVER, PRELUDE  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CALLS = r"""
using namespace qla_bwd;
template <int K, int V> static void values(const unsigned short* v, const void* dw, const float* beta, unsigned short* dv, int stride,
                                           int rows, const void* s, const void* ds, float* out) {
  unsigned held[V / 4];
  load_values<V>(v, stride, rows, held, threadIdx.x);
  finish_values<V, false>(dw, held, beta, dv, stride, rows, out, threadIdx.x);
  dot_states<K * V, false>(s, ds, out, threadIdx.x);
}
template <typename T> static T* pointer(int i);
static int number(int i);
#define ARGUMENTS pointer<unsigned short>(0), pointer<void>(1), pointer<float>(2), pointer<unsigned short>(3), number(4), number(5), \
  pointer<void>(6), pointer<void>(7), pointer<float>(8)
static void kernel() {
  const int K = number(9), V = number(10);
  if (K == 64 && V == 64) values<64, 64>(ARGUMENTS);
  if (K == 64 && V == 128) values<64, 128>(ARGUMENTS);
  if (K == 128 && V == 64) values<128, 64>(ARGUMENTS);
  if (K == 128 && V == 128) values<128, 128>(ARGUMENTS);
}
"""
ACCESS = r"""
template <typename T> static T* pointer(int i) { return (T*)arguments[i]; }
static int number(int i) { return (int)(intptr_t)arguments[i]; }
"""
PLACES = {"kValueBetas": 832, "kDots": 896}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    text = Path(bwd_fused.__file__).with_suffix(".cuh").read_text()
    assert all(f"{name} = {value}" in text for name, value in PLACES.items())
    device = text[text.index("// <S, dS>, states of") : text.index("template <bool HALF>\n__device__ __forceinline__ int store_rounded")]
    constants = "\n".join(f"constexpr int {name} = {value};" for name, value in PLACES.items())
    names = "constexpr unsigned kAll = 0xffffffffu;\nstatic int opaque(int x) { return x; }\n" + constants
    source = tmp_path_factory.mktemp("values") / "values.cpp"
    namespace = f"namespace qla_bwd {{\n{names}\n{device}\n}}"
    source.write_text("\n".join([PRELUDE, namespace, CALLS, DRIVER.replace("KERNEL_CALL", "kernel()"), ACCESS]))
    library = source.with_suffix(".so")
    command = [COMPILER, "-std=c++20", "-O0", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(library)).launch


def swizzled(x):
    """[64, V] as TMA writes it: tiles of 64 columns, in which row r has its piece p of 8 columns at place p ^ (r % 8)."""
    pieces = x.view(64, -1, 8, 8)  # row, tile, piece, element
    places = torch.arange(8).view(1, 8) ^ (torch.arange(64).view(64, 1) % 8)
    return torch.stack([pieces[row, :, places[row]] for row in range(64)], dim=1).contiguous()


@pytest.mark.parametrize("rows", [64, 63, 17, 1])
@pytest.mark.parametrize(("key_dim", "value_dim"), list(itertools.product(ws.HEAD_DIMS, ws.HEAD_DIMS)))
def test_values(launch, key_dim, value_dim, rows):
    heads = 3
    v = torch.randn(64, heads, value_dim).bfloat16()
    dw, beta = torch.randn(64, value_dim).bfloat16(), torch.rand(64)
    dw[rows:], v[rows:] = 0, torch.nan
    dv = torch.full((64, heads, value_dim), torch.nan, dtype=torch.bfloat16)
    s, ds = (torch.randn(value_dim, key_dim).bfloat16() for _ in range(2))
    out, tiles = torch.full((bwd_fused.SUMS,), torch.nan), swizzled(dw)
    pointers = [v[:, 1].data_ptr(), tiles.data_ptr(), beta.data_ptr(), dv[:, 1].data_ptr(), heads * value_dim, rows]
    pointers += [s.data_ptr(), ds.data_ptr(), out.data_ptr(), key_dim, value_dim]
    launch((ctypes.c_void_p * len(pointers))(*pointers), 1, 1, 1, ws.WARPGROUP)
    assert torch.equal(dv[:rows, 1], (beta[:rows, None] * dw[:rows].float()).bfloat16())
    assert dv[rows:].isnan().all() and dv[:, ::2].isnan().all(), "rows of others, and other heads"
    betas, dots = out[PLACES["kValueBetas"] :][:64], out[PLACES["kDots"] :][:4]
    torch.testing.assert_close(betas[:rows], (dw.float() * v[:, 1].float())[:rows].sum(1), rtol=1e-5, atol=1e-5)
    assert (betas[rows:] == 0).all()
    torch.testing.assert_close(dots.sum(), (s.float() * ds.float()).sum(), rtol=1e-4, atol=1e-2)
    assert out[: PLACES["kValueBetas"]].isnan().all() and out[PLACES["kDots"] + 4 :].isnan().all()
