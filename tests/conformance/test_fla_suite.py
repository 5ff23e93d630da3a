"""What fla's own tests of the Gated Delta Rule ask of ``chunk_gated_delta_rule``, asked of qla's.

fla (flash-linear-attention) checks its function in tests/ops/test_gdn.py (read at commit bc3b101, between 0.5.2 and 0.6.0). The sizes,
input ranges, options and tolerances are taken from there, the code is not; each test here names the ones it stands for. fla compares with
a float32 recurrence, or with its own function called in another way; here everything is compared with the float64 recurrence of
``qla.reference``, sequence by sequence, and what fla compares with itself is compared with itself as well.

    here                fla's tests                             inputs                        checked
    test_chunk          test_chunk                              fp16 and bf16, HV >= H, head  o, ht, dq, dk, dv, dg, dbeta, dh0
                                                                sizes 60 to 128, gates / 0.01
                                                                to / 10, all or half of them 0
    test_chunk_sizes    test_chunk_with_chunk_size              fp32                          the same
    test_beta_logits    test_chunk_beta_sigmoid_in_kernel       fp16, beta up to 1 or 2       the same, and sigmoid before the call
    test_raw_gates      test_chunk_gate_in_kernel, its _gqa     fp16, A_log, dt_bias or none  the same with dA_log and ddt_bias, and
                        and _varlen                                                           gates before the call
    test_v_first        test_chunk_state_v_first                fp16, initial states          the same, and the other layout
    test_packed         test_chunk_varlen                       fp16, also g and h0; cu       the same
    test_packed_prefill test_chunk_varlen_prefill               fp16, also g, beta and h0     o, ht in inference mode
    test_normal         test_flash_qla_chunk, its _varlen,      bf16 and fp16, normal q, k,   all; V-first bit for bit
                        _state_v_first and _forward_only        v, head size 128
    test_float32        test_fused_recurrent, its _gate_in_     fp32 (qla: PyTorch)           o, ht
                        kernel, _beta_sigmoid_in_kernel and
                        _state_v_first
    test_gate_alone     test_gate                               fp32                          the gates, dg, dA_log, ddt_bias
    test_old_name       test_fused_recurrent_state_v_first                                    a warning, an error

Left out: what tests fla's other functions (the fused recurrent kernel in 16 bits, single kernels) and which of its backends it picks.

Errors are fla's: root mean square of the difference over that of the exact values, and nothing is held against differences up to 1e-6.
``TOLERANCES`` is what test_chunk and test_chunk_gate_in_kernel allow; where another test of fla's differs, its tolerances stand there.
bf16 is not in fla's test_chunk. Here it is, held to the same numbers, but for the one case without any decay: there rounding the operands
of every product to bf16 costs 5e-3 in plain PyTorch already (``problems.rounded_chunked``), all that is allowed.

With QLA_TEST_DEVICE=cpu the large sizes carry the marker ``slow``: ``-m "not slow"`` leaves them out. With them,
MALLOC_MMAP_THRESHOLD_=65536 in the environment keeps glibc from holding ten times the memory that is in use (13 GB for 2 x 2048 tokens).
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from problems import DEVICE, NAN_FILLED, assert_same_bits, gpu_marks, nan_filled_empty  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import qla
from qla.reference import recurrent_gated_delta_rule

pytestmark = gpu_marks(NAN_FILLED)

Tensors = dict[str, Tensor]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

TOLERANCES = dict.fromkeys(("o", "ht"), 0.005) | dict.fromkeys(("dq", "dk", "dv", "dh0"), 0.008)
TOLERANCES |= dict.fromkeys(("dg", "dbeta", "dA_log", "ddt_bias"), 0.02)
CHUNK_SIZES = {name: 0.01 if name in ("dg", "dbeta") else 0.005 for name in TOLERANCES}
PACKED = TOLERANCES | {"dq": 0.007, "dv": 0.007, "dg": 0.015, "dbeta": 0.015, "dh0": 0.007}
NORMAL = dict.fromkeys(TOLERANCES, 0.008) | {"dg": 0.035}
NO_DIFFERENCE = 1e-6

L2NORM, SIGMOID, GATE = "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel"
PIECE = 128  # tokens of the recurrence whose states are kept at a time
SLOW_ON_CPU = 85e6  # elements of all states, one after each token


class Case(NamedTuple):
    """Inputs of one call and gradients of its results.

    leaves: q, k, v, g, beta, h0 and, where gates are raw, A_log and perhaps dt_bias.
    cu: bounds of packed sequences, or None.
    activations: which of L2NORM, SIGMOID and GATE lie between the leaves and the recurrence.
    beta_scale: 2 where beta is twice a sigmoid.
    """

    leaves: Tensors
    do: Tensor
    dht: Tensor
    scale: float | None
    cu: list[int] | None
    activations: Collection[str]
    beta_scale: int


def make_case(
    rng: torch.Generator,
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    scale: float | None = None,
    *,
    qkv: str = "uniform",
    g: str = "uniform",
    beta: str = "uniform",
    h0: str = "zero",
    dht: str = "normal",
    normalizer: float = 1,
    mask_p: float = 0,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_scale: int = 1,
    cu: list[int] | None = None,
    unit: bool = True,
    small: tuple[str, ...] = (),
) -> Case:
    """Draws a case of ``size`` (B, T, H, HV, D).

    qkv, g, beta, h0, dht: what noise they are made of. g is a log sigmoid of it over ``normalizer``, 0 with probability ``mask_p``, or the
        noise itself where A_log is given. beta is the sigmoid of it, or the noise itself ("logits").
    unit: q and k are to be divided by their lengths on the way; otherwise k is here.
    small: the names among g, beta and h0 that are of ``dtype`` too; the others are fp32.
    """
    batch, tokens, heads, value_heads, dim = size
    num_seqs = batch if cu is None else len(cu) - 1

    def noise(kind: str, *shape: int) -> Tensor:
        if kind == "zero":
            return torch.zeros(shape)
        return (torch.rand if kind == "uniform" else torch.randn)(*shape, generator=rng)

    x = {name: noise(qkv, batch, tokens, heads if name in "qk" else value_heads, dim) for name in "qkv"}
    if not unit:
        x["k"] = F.normalize(x["k"], dim=-1)
    x["g"] = noise(g, batch, tokens, value_heads)
    if A_log is None:
        x["g"] = F.logsigmoid(x["g"]) / normalizer * (noise("uniform", *x["g"].shape) >= mask_p)
    x["beta"] = noise("normal" if beta == "logits" else beta, batch, tokens, value_heads)
    x["beta"] = x["beta"] if beta == "logits" else x["beta"].sigmoid()
    x["h0"] = noise(h0, num_seqs, value_heads, dim, dim)
    x |= {name: t for name, t in (("A_log", A_log), ("dt_bias", dt_bias)) if t is not None}
    leaves = {name: t.to(DEVICE, dtype if name in ("q", "k", "v", *small) else FP32) for name, t in x.items()}
    activations = [name for name, there in ((L2NORM, unit), (SIGMOID, beta == "logits"), (GATE, A_log is not None)) if there]
    do, d_state = noise("normal", *x["v"].shape).to(DEVICE, dtype), noise(dht, *x["h0"].shape).to(DEVICE)
    return Case(leaves, do, d_state, scale, cu, activations, beta_scale)


def by_hand(case: Case, x: Tensors, which: Collection[str]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta after some activations in PyTorch. Unit rows are rounded to the call's dtype, and keep the exact rows' gradient."""

    def unit_rows(t: Tensor) -> Tensor:
        exact = F.normalize(t if t.dtype == torch.float64 else t.float(), dim=-1)
        return (exact + (exact.to(case.do.dtype).to(exact.dtype) - exact).detach()).to(t.dtype)

    q, k = (unit_rows(x[name]) if L2NORM in which else x[name] for name in "qk")
    beta = case.beta_scale * x["beta"].sigmoid() if SIGMOID in which else x["beta"]
    g = -x["A_log"].exp() * F.softplus(x["g"] + x.get("dt_bias", 0)) if GATE in which else x["g"]
    return q, k, x["v"], g, beta


def results(case: Case, leaves: Tensors, o: Tensor, ht: Tensor) -> Tensors:
    """o, ht, and the gradients of sum(do o) + sum(dht ht) for all leaves, unless gradients are off."""
    found = {"o": o, "ht": ht}
    if torch.is_grad_enabled():
        gradients = torch.autograd.grad([o, ht], list(leaves.values()), [case.do.to(o.dtype), case.dht.to(ht.dtype)])
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape, f"d{name}: {gradient.dtype} {tuple(gradient.shape)}"
            found[f"d{name}"] = gradient
    return {name: t.detach() for name, t in found.items()}


def leaves_of(case: Case, wide: bool = False) -> Tensors:
    leaves = {name: t.double() if wide else t.clone() for name, t in case.leaves.items()}
    return {name: t.requires_grad_() if torch.is_grad_enabled() else t for name, t in leaves.items()}


def run(case: Case, inside: Collection[str] = (), v_first: bool = False, **options: object) -> Tensors:
    """qla's results, with the activations ``inside`` left to qla and the others before the call; states in K-first order in any case."""
    leaves = leaves_of(case)
    q, k, v, g, beta = by_hand(case, leaves, set(case.activations) - set(inside))
    flip = (lambda t: t.transpose(-1, -2).contiguous()) if v_first else (lambda t: t)
    options |= dict.fromkeys(inside, True)
    if SIGMOID in inside:
        options["allow_neg_eigval"] = case.beta_scale == 2
    if GATE in inside:
        options |= {name: leaves.get(name) for name in ("A_log", "dt_bias")}
    cu = None if case.cu is None else torch.tensor(case.cu, device=DEVICE)
    o, ht = qla.chunk_gated_delta_rule(
        q, k, v, g, beta, case.scale, flip(leaves["h0"]), True, state_v_first=v_first, cu_seqlens=cu, **options
    )
    assert ht is not None and ht.dtype == FP32 and o.dtype == q.dtype and o.shape == v.shape
    return results(case, leaves, o, flip(ht))


def exact(case: Case) -> Tensors:
    """The float64 recurrence, one sequence after the other and in pieces: the states of one piece are kept, those between pieces stored."""
    leaves = leaves_of(case, wide=True)
    inputs = by_hand(case, leaves, case.activations)
    bounds = [(0, inputs[0].shape[1])] if case.cu is None else pairwise(case.cu)
    outputs, finals = [], []
    for n, (begin, end) in enumerate(bounds):
        state = leaves["h0"] if case.cu is None else leaves["h0"][n : n + 1]
        for first in range(begin, end, PIECE):
            rows = [t[:, first : min(first + PIECE, end)] for t in inputs]
            if torch.is_grad_enabled():
                o, state = checkpoint(recurrent_gated_delta_rule, *rows, case.scale, state, True, use_reentrant=False)
            else:
                o, state = recurrent_gated_delta_rule(*rows, case.scale, state, True)
            outputs.append(o)
        finals.append(state)
    return results(case, leaves, torch.cat(outputs, 1), torch.cat(finals))


def compare(got: Tensors, expected: Tensors, tolerances: dict[str, float] | float = TOLERANCES) -> None:
    """Each result and gradient within its tolerance, by fla's measure."""
    assert got.keys() == expected.keys()
    failures = []
    for name, right in expected.items():
        difference, right = got[name].double() - right.double(), right.double()
        error = float(difference.square().mean().sqrt() / (right.square().mean().sqrt() + 1e-8))
        limit = tolerances if isinstance(tolerances, float) else tolerances[name]
        if not (error < limit or float(difference.abs().max()) <= NO_DIFFERENCE):  # not (..): NaN fails
            failures.append(f"{name}: {error:.2e}, allowed {limit:.0e}")
    assert not failures, "; ".join(failures)


def sized(*values: object) -> object:
    """A set of parameters that holds a size (B, T, H, HV, D), or (H, HV, D) and the bounds of packed sequences."""
    size = next(v for v in values if isinstance(v, tuple))
    size = size if len(size) == 5 else packed_size(*values[:2])  # type: ignore[arg-type]
    batch, tokens, _, value_heads, dim = size
    slow = DEVICE == "cpu" and batch * tokens * value_heads * dim * dim > SLOW_ON_CPU
    name = "-".join(str(v).removeprefix("torch.").replace(", ", "x").strip("()[]") for v in values)
    return pytest.param(*values, id=name, marks=[pytest.mark.slow] if slow else [])


def packed_size(heads: tuple[int, int, int], cu: list[int]) -> tuple[int, int, int, int, int]:
    return (1, cu[-1], *heads)


CHUNK_CASES = [  # size, scale, normalizer, mask_p, whether qla normalises
    ((4, 1024, 4, 4, 128), 0.1, 1, 1.0, False),
    ((2, 75, 4, 4, 64), 1, 0.01, 0, False),
    ((2, 500, 3, 3, 60), 1, 1, 0, False),
    ((2, 1000, 3, 3, 64), 0.1, 1, 0.5, False),
    ((3, 1024, 4, 4, 100), 1, 0.1, 0, False),
    ((4, 1024, 4, 4, 128), 0.1, 1, 0, True),
    ((2, 1500, 4, 4, 128), 0.1, 10, 0, False),
    ((4, 2048, 8, 8, 64), 0.1, 1, 0, False),
    ((2, 256, 2, 4, 64), 1, 1, 0, False),
    ((2, 512, 2, 8, 64), 1, 0.1, 0, True),
    ((2, 1024, 4, 8, 128), 0.1, 1, 0, False),
]


BF16_CHUNK_CASES = [case for case in CHUNK_CASES if case[3] < 1]


@pytest.mark.parametrize(
    "size, scale, normalizer, mask_p, inside, dtype",
    [*(sized(*case, FP16) for case in CHUNK_CASES), *(sized(*case, BF16) for case in BF16_CHUNK_CASES)],
)
def test_chunk(size, scale, normalizer, mask_p, inside, dtype, rng):
    case = make_case(rng, size, dtype, scale, normalizer=normalizer, mask_p=mask_p)
    compare(run(case, [L2NORM] if inside else []), exact(case))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_sizes(chunk_size, rng):
    case = make_case(rng, (1, 64, 2, 4, 32), FP32, 0.1)
    compare(run(case, chunk_size=chunk_size), exact(case), CHUNK_SIZES)


LOGIT_CASES = [  # size, scale, whether qla normalises, factor of beta
    ((2, 500, 4, 4, 64), 1, False, 1),
    ((3, 1024, 4, 4, 128), 0.1, True, 2),
    ((2, 1024, 4, 8, 128), 0.1, False, 2),
    ((4, 2048, 8, 8, 64), 0.1, True, 1),
]


@pytest.mark.parametrize("size, scale, inside, beta_scale", [sized(*case) for case in LOGIT_CASES])
def test_beta_logits(size, scale, inside, beta_scale, rng):
    case = make_case(rng, size, FP16, scale, beta="logits", beta_scale=beta_scale)
    others = [L2NORM] if inside else []
    got = run(case, [SIGMOID, *others])
    compare(got, exact(case))
    compare(got, run(case, others), TOLERANCES | {"dg": 0.008})


RAW_GATE_CASES = [  # size, or heads and bounds, scale, whether there is a bias, whether qla normalises
    ((2, 75, 4, 4, 64), None, 1, True, True),
    ((2, 500, 3, 3, 60), None, 1, False, False),
    ((2, 1000, 3, 3, 64), None, 0.1, True, False),
    ((3, 1024, 4, 4, 100), None, 1, True, True),
    ((4, 1024, 4, 4, 128), None, 0.1, False, True),
    ((4, 2048, 8, 8, 64), None, 0.1, True, False),
    ((2, 256, 2, 4, 64), None, 1, True, True),
    ((2, 512, 1, 4, 64), None, 0.1, False, True),
    ((2, 512, 2, 8, 64), None, 1, True, True),
    ((2, 1024, 4, 8, 128), None, 0.1, True, True),
    ((4, 4, 60), [0, 15], None, True, True),
    ((4, 4, 64), [0, 256, 500, 1000], None, False, True),
    ((4, 4, 64), [0, 256, 500, 1000], None, True, True),
    ((4, 4, 100), [0, 15, 100, 300, 1200, 2000], None, True, True),
]


@pytest.mark.parametrize("size, cu, scale, bias, inside", [sized(*case) for case in RAW_GATE_CASES])
def test_raw_gates(size, cu, scale, bias, inside, rng):
    noise = {} if cu is None else {"qkv": "normal", "h0": "normal", "dht": "uniform"}
    size = size if cu is None else packed_size(size, cu)
    A_log, dt_bias = torch.randn(2, size[3], generator=rng)
    case = make_case(rng, size, FP16, scale, g="normal", A_log=A_log, dt_bias=dt_bias if bias else None, cu=cu, **noise)
    others = [L2NORM] if inside else []
    got = run(case, [GATE, *others])
    compare(got, exact(case))
    compare(got, run(case, others))


V_FIRST_CASES = [((1, 63, 1, 1, 64), 1), ((2, 500, 3, 3, 60), 1), ((3, 1024, 4, 4, 128), 0.1), ((4, 2048, 8, 8, 64), 0.1)]


@pytest.mark.parametrize("size, scale", [sized(*case) for case in V_FIRST_CASES])
def test_v_first(size, scale, rng):
    case = make_case(rng, size, FP16, scale, h0="normal", small=("beta",))
    got = run(case, v_first=True)
    compare(got, exact(case))
    compare(got, run(case), 1e-4)


PACKED_CASES = [  # heads and head size, bounds, mask_p
    ((4, 4, 60), [0, 15], 0),
    ((4, 4, 64), [0, 256, 500, 1000], 0),
    ((4, 4, 64), [0, 256, 500, 1000], 0.5),
    ((4, 4, 100), [0, 15, 100, 300, 1200, 2000], 0),
    ((2, 4, 64), [0, 256, 500, 1000], 0),
    ((2, 8, 64), [0, 256, 500, 1000], 0),
]


@pytest.mark.parametrize("heads, cu, mask_p", [sized(*case) for case in PACKED_CASES])
def test_packed(heads, cu, mask_p, rng):
    noise = {"qkv": "normal", "h0": "normal", "dht": "uniform"}
    case = make_case(rng, packed_size(heads, cu), FP16, cu=cu, mask_p=mask_p, unit=False, small=("g", "h0"), **noise)
    compare(run(case), exact(case), PACKED)


@pytest.mark.parametrize("heads, cu, mask_p", [sized((4, 4, 60), [0, 8192], 0), *(sized(*case) for case in PACKED_CASES[:4])])
@torch.inference_mode()
def test_packed_prefill(heads, cu, mask_p, rng):
    noise = {"qkv": "normal", "h0": "normal"}
    case = make_case(rng, packed_size(heads, cu), FP16, cu=cu, mask_p=mask_p, unit=False, small=("g", "beta", "h0"), **noise)
    compare(run(case), exact(case), PACKED)


NORMAL_CASES = [
    ((1, 1024, 4, 4, 128), None, BF16),
    ((2, 2048, 8, 8, 128), None, BF16),
    ((1, 4096, 16, 16, 128), None, BF16),
    ((1, 1024, 4, 4, 128), None, FP16),
    ((2, 2048, 8, 8, 128), None, FP16),
    ((1, 1024, 2, 8, 128), None, BF16),
    ((2, 2048, 4, 16, 128), None, BF16),
    ((4, 4, 128), [0, 256, 500, 1000], BF16),
    ((8, 8, 128), [0, 100, 300, 1200, 2000], BF16),
    ((16, 16, 128), [0, 101, 303, 1205, 3007, 4096], BF16),
]


@pytest.mark.parametrize("size, cu, dtype", [sized(*case) for case in NORMAL_CASES])
def test_normal(size, cu, dtype, rng):
    size = size if cu is None else packed_size(size, cu)
    case = make_case(rng, size, dtype, qkv="normal", g="normal", beta="normal", h0="normal", cu=cu)
    got, expected = run(case, [L2NORM]), exact(case)
    compare(got, expected, NORMAL)
    assert_same_bits(list(run(case, [L2NORM], v_first=True).values()), list(got.values()), "V-first", list(got))
    with torch.no_grad():
        forward = run(case, [L2NORM])
    compare(forward, {name: expected[name] for name in ("o", "ht")}, NORMAL)


FLOAT32_CASES = [  # size, scale, normalizer, options
    ((1, 63, 1, 1, 64), 1, 1, "layouts"),
    ((2, 500, 4, 4, 60), 1, 1, "layouts"),
    ((2, 1000, 2, 8, 128), 1, 0.1, "layouts"),
    ((3, 1024, 2, 2, 128), 0.1, 1, "layouts"),
    ((4, 1024, 3, 3, 128), 1, 10, ""),
    ((4, 2048, 4, 4, 64), 0.1, 1, "layouts"),
    ((1, 64, 1, 1, 64), 1, 1, "raw gates"),
    ((2, 256, 2, 2, 64), 1, 1, "raw gates with bias"),
    ((1, 64, 1, 1, 64), 1, 1, "logits"),
]


@pytest.mark.parametrize("size, scale, normalizer, option", [sized(*case) for case in FLOAT32_CASES])
@torch.no_grad()
def test_float32(size, scale, normalizer, option, rng):
    """A_log between log 1 and log 16: gates much stronger than in test_raw_gates."""
    options = {"normalizer": normalizer}
    if option.startswith("raw gates"):
        heads, bias = size[3], "bias" in option
        A_log, dt_bias = (1 + 15 * torch.rand(heads, generator=rng)).log(), torch.randn(heads, generator=rng)
        options |= {"g": "normal", "A_log": A_log, "dt_bias": dt_bias if bias else None}
    elif option == "logits":
        options |= {"beta": "logits"}
    case = make_case(rng, size, FP32, scale, qkv="normal", h0="normal", **options)
    got = run(case, case.activations)
    compare(got, exact(case), 0.005 if option == "logits" else 0.002)
    if option == "layouts":
        compare(run(case, case.activations, v_first=True), got, 1e-4)


@pytest.mark.parametrize("size, bias", [((1, 32, 2), False), ((2, 64, 4), True), ((4, 128, 8), True), ((4, 128, 16), False)], ids=str)
def test_gate_alone(size, bias, rng):
    """Each token is a sequence with state 1, and nothing is added to it: the logarithm of the final state is the gate.

    The state is float64, so that no decay underflows; the gate is computed in fp32 as ever.
    """
    heads = size[-1]
    leaves = {"g": torch.randn(size, generator=rng), "A_log": (1 + 15 * torch.rand(heads, generator=rng)).log()}
    leaves |= {"dt_bias": torch.randn(heads, generator=rng)} if bias else {}
    do = torch.randn(size, generator=rng).to(DEVICE).double()

    def with_gradients(dtype: torch.dtype, gates: object) -> Tensors:
        x = {name: t.to(DEVICE, dtype).requires_grad_() for name, t in leaves.items()}
        found = gates(x).view(size)
        return {"o": found.detach()} | dict(zip(x, torch.autograd.grad(found, list(x.values()), do), strict=True))

    def through_the_state(x: Tensors) -> Tensor:
        g = x["g"].reshape(-1, 1, heads)
        zeros, one = g.new_zeros(*g.shape, 1, dtype=torch.float64), g.new_ones(len(g), heads, 1, 1, dtype=torch.float64)
        options = {GATE: True, "A_log": x["A_log"], "dt_bias": x.get("dt_bias")}
        _, state = qla.chunk_gated_delta_rule(zeros, zeros, zeros, g, zeros[..., 0], None, one, True, **options)
        return state.log()

    expected = with_gradients(torch.float64, lambda x: -x["A_log"].exp() * F.softplus(x["g"] + x.get("dt_bias", 0)))
    compare(with_gradients(FP32, through_the_state), expected, 1e-4)


def test_old_name(rng):
    case = make_case(rng, (2, 70, 2, 4, 64), FP16, h0="normal")
    flipped = case._replace(leaves=case.leaves | {"h0": case.leaves["h0"].transpose(-1, -2).contiguous()})
    with torch.no_grad(), pytest.warns(DeprecationWarning, match="state_v_first"):
        old = run(flipped, transpose_state_layout=True)
    with torch.no_grad():
        compare(old | {"ht": old["ht"].transpose(-1, -2)}, run(case), 1e-4)
        with pytest.raises(ValueError, match="transpose_state_layout"):
            run(case, v_first=True, transpose_state_layout=True)
