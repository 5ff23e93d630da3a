"""One small forward and backward of each kernel variant, to run under compute-sanitizer on a Hopper GPU.

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

Packed sequences with tails, an empty one and rows that none owns; equal lengths; both block widths and dtypes; states in
both layouts; head sizes of 64; offsets that are wrong; sequences cut into segments of a chunk or two, with warm-up, transitions and serial
heads; activations; decoding. The sanitizer slows kernels down a hundredfold, so everything is tiny: the wide blocks are for
many items, which here are sequences of a few tokens. The backward pass runs whole and in slices of one key head. PyTorch's
cache of freed memory is switched off, so that memcheck sees the true ends of the tensors. ``--quick`` leaves out fp16.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported: an allocation of its own for each tensor.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import qla  # noqa: E402
from qla.autocp import Plan  # noqa: E402


def inputs(tokens: int, heads: tuple[int, int], dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    h, hv = heads
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, h, 128, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(batch, tokens, hv, 128, device="cuda").to(dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, hv, device="cuda"))
    return [q, k, v, g, torch.rand(batch, tokens, hv, device="cuda")]


def of_sizes(tensors: list[Tensor], key_dim: int, value_dim: int) -> list[Tensor]:
    """The same with narrower heads."""
    q, k, v, g, beta = tensors
    return [*(x[..., :key_dim].contiguous() for x in (q, k)), v[..., :value_dim].contiguous(), g, beta]


def run(name: str, tensors: list[Tensor], lengths: list[int] | None, state: bool = True, check: bool = True, **options: object) -> None:
    """One call and its backward pass; ``lengths`` are offsets of packed sequences, or None. Raises unless every element is finite."""
    cu = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    sequences = tensors[0].shape[0] if cu is None else len(cu) - 1
    key_dim, value_dim = tensors[0].shape[3], tensors[2].shape[3]
    inner = (value_dim, key_dim) if options.get("state_v_first") else (key_dim, value_dim)
    h0 = torch.randn(sequences, tensors[2].shape[2], *inner, device="cuda") if state else None
    leaves = [x.detach().requires_grad_() for x in (*tensors, *([] if h0 is None else [h0]))]
    start = leaves[5] if state else None
    o, final = qla.chunk_gated_delta_rule(*leaves[:5], initial_state=start, output_final_state=state, cu_seqlens=cu, **options)
    torch.cuda.synchronize()
    results = [x for x in (o, final) if x is not None]
    losses = [torch.randn_like(x) for x in results]
    found = [*results]
    for limit in (None, "1"):
        os.environ.pop("QLA_WORKSPACE_BYTES", None)
        if limit is not None:
            os.environ["QLA_WORKSPACE_BYTES"] = limit
        found += torch.autograd.grad(results, leaves, losses, retain_graph=True)
        torch.cuda.synchronize()
    os.environ.pop("QLA_WORKSPACE_BYTES", None)
    for x in found:
        if check and not bool(torch.isfinite(x).all()):
            raise SystemExit(f"{name}: not finite")
    print(f"{name}: done", flush=True)


def decode(name: str, tensors: list[Tensor], lengths: list[int] | None, check: bool = True, **options: object) -> None:
    """Steps of ``fused_recurrent_gated_delta_rule`` with all activations, in both layouts."""
    q, k, v, g, beta = tensors
    cu = None if lengths is None else torch.tensor(lengths, dtype=torch.int64, device="cuda")
    sequences, heads = q.shape[0] if cu is None else len(cu) - 1, v.shape[2]
    per_head = [torch.randn(heads, device="cuda") for _ in range(2)]
    for v_first in (False, True):
        inner = (v.shape[3], k.shape[3]) if v_first else (k.shape[3], v.shape[3])
        for h0 in (None, torch.randn(sequences, heads, *inner, device="cuda")):
            gk = torch.zeros(*v.shape[:3], k.shape[3], device="cuda")
            activations = (True, True, *per_head, True, True)
            results = qla.fused_recurrent_gated_delta_rule(q, k, v, g, gk, None, beta, None, h0, True, *activations, v_first, cu)
            torch.cuda.synchronize()
            if check and not all(bool(torch.isfinite(x).all()) for x in results):
                raise SystemExit(f"{name}: not finite")
    print(f"{name}: done", flush=True)


def main() -> None:
    from qla.kernels.launch import choose_block_v

    torch.manual_seed(0)
    dtypes = (torch.bfloat16,) if "--quick" in sys.argv else (torch.bfloat16, torch.float16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    count = next(n for n in range(1, 10_000) if choose_block_v(8 * n, sms) == 128)
    for dtype in dtypes:
        run(f"{dtype} packed, 2/4 heads", inputs(215, (2, 4), dtype), [0, 70, 70, 134, 200])
        run(f"{dtype} packed, 2/2 heads, V-first", inputs(130, (2, 2), dtype), [0, 65, 130], state_v_first=True)
        run(f"{dtype} equal lengths, 1/3 heads, no state", inputs(100, (1, 3), dtype, batch=2), None, state=False)
        run(f"{dtype} {count * 8} items, wide blocks", inputs(3 * count, (2, 8), dtype), list(range(0, 3 * count + 1, 3)))
        run(f"{dtype} {count * 8} items of 66 tokens, wide blocks", inputs(66, (2, 8), dtype, batch=count), None, state=False)
        for plan in (Plan(1, 1, 1, 1, 0), Plan(1, 2, 0, 1, 2), Plan(2, 1, 0, 1, 1000)):
            cut = inputs(360, (2, 4), dtype)
            cut[3][..., ::2] = 0.0  # every second head never decays
            run(f"{dtype} {plan}", cut, [0, 260, 260, 261, 350], auto_cp=plan)
            for dims in ((64, 64), (64, 128), (128, 64)):
                run(f"{dtype} {plan}, head sizes {dims}", of_sizes(cut, *dims), [0, 260, 260, 261, 350], auto_cp=plan, state_v_first=True)
        for dims in ((64, 64), (64, 128), (128, 64)):
            run(f"{dtype} packed, head sizes {dims}", of_sizes(inputs(215, (2, 4), dtype), *dims), [0, 70, 70, 134, 200])
            few = of_sizes(inputs(3 * count, (2, 8), dtype), *dims)
            run(f"{dtype} {count * 8} items, head sizes {dims}", few, list(range(0, 3 * count + 1, 3)))
        A_log, dt_bias = (torch.randn(4, device="cuda") for _ in range(2))
        joint = torch.randn(1, 130, 6 * 128, device="cuda").to(dtype)  # q and k are slices of it, read in place
        q, k = (joint[..., i * 256 : (i + 1) * 256].unflatten(-1, (2, 128)) for i in range(2))
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
        run(f"{dtype} activations", [q, k, *inputs(130, (2, 4), dtype)[2:]], [0, 65, 128], A_log=A_log, dt_bias=dt_bias, **options)
    for dtype in (*dtypes, torch.float32):
        decode(f"{dtype} decoding, 2/8 heads", inputs(2, (2, 8), dtype, batch=3), None)
        decode(f"{dtype} decoding, packed, rows that none owns", inputs(11, (2, 4), dtype), [0, 1, 1, 4, 9])
        decode(f"{dtype} decoding, head sizes 60", of_sizes(inputs(2, (1, 3), dtype, batch=2), 60, 60), None)
    for wrong in ([0, 50, 20, 128], [0, 300], [-64, 128], [100, 0, 100], [2**31 - 1, -(2**31)]):
        run(f"wrong offsets {wrong}", inputs(128, (2, 4), torch.bfloat16), wrong, check=False)
        decode(f"wrong offsets {wrong}, decoding", inputs(128, (2, 4), torch.bfloat16), wrong, check=False)
        run(f"wrong offsets {wrong}, cut", inputs(128, (2, 4), torch.bfloat16), wrong, check=False, auto_cp=Plan(1, 2, 0, 1, 1))


if __name__ == "__main__":
    main()
