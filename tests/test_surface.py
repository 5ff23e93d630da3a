"""The call surface on a GPU: fla's arguments, dtypes, views, paths without kernels, errors before a launch, gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DEVICE,
    FLOOR,
    NAN_FILLED,
    Inputs,
    assert_accurate,
    assert_same_bits,
    cu_of,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
)
from torch.utils.checkpoint import checkpoint

import qla
from qla import checks
from qla.reference import chunked_gated_delta_rule

pytestmark = gpu_marks(NAN_FILLED)


@pytest.fixture
def warnings_not_given_yet(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())


# fla's arguments


def test_by_position_and_by_keyword(rng):
    x = make_inputs(rng, [70, 64])
    names = ("q", "k", "v", "g", "beta")
    by_keyword = qla.chunk_gated_delta_rule(
        **dict(zip(names, x.tensors, strict=True)), scale=0.1, initial_state=x.h0, output_final_state=True, cu_seqlens=x.cu
    )
    # q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, beta sigmoid, negative eigenvalues, V first, cu_seqlens
    by_position = qla.chunk_gated_delta_rule(*x.tensors, 0.1, x.h0, True, False, False, False, False, x.cu)
    assert_same_bits(by_position, by_keyword, "position and keyword")
    assert qla.chunk_gdn is qla.chunk_gated_delta_rule


def test_arguments_that_change_nothing(rng):
    x = make_inputs(rng, [70, 64])
    expected = x.run()
    assert_same_bits(x.run(some_future_argument=1, layer_idx=3, chunk_size=32, use_gate_in_kernel=False), expected, "unknown keywords")
    indices = torch.tensor([[0, 0], [0, 1], [1, 0]], device=DEVICE)
    assert_same_bits(x.run(chunk_indices=indices, cu_seqlens_cpu=x.cu.cpu(), auto_cp=False), expected, "chunk_indices and others")
    assert_same_bits(x.run(cu_seqlens=x.cu.cpu()), expected, "cu_seqlens on the CPU")


def test_old_name_of_the_state_layout(rng):
    x = make_inputs(rng, [70, 64])
    h0 = x.h0.transpose(-1, -2).contiguous()
    expected = x.run(initial_state=h0, state_v_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_bits(x.run(initial_state=h0, transpose_state_layout=True), expected, "transpose_state_layout")


def test_activations_inside(rng):
    """l2norm, the sigmoid of beta, negative eigenvalues and the gate, against the same done before in float64."""
    x = make_inputs(rng, [130, 65])
    q, k = 3 * x.q, 0.3 * x.k
    raw_beta, raw_g = (torch.randn(x.g.shape, generator=rng).to(DEVICE) for _ in range(2))
    A_log, dt_bias = (torch.randn(4, generator=rng).to(DEVICE) for _ in range(2))
    raw = x.with_(q=q, k=k, beta=raw_beta, g=raw_g)
    got = raw.run(
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    wide_q, wide_k = (t.double() / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    g = -A_log.double().exp() * F.softplus(raw_g.double() + dt_bias.double())
    expected = Inputs(wide_q, wide_k, x.v.double(), g, 2 * raw_beta.double().sigmoid(), x.h0, x.cu).exact()
    for actual, exact in zip(got, expected, strict=True):
        assert relative(actual, exact) < 2 * FLOOR[torch.bfloat16]  # q and k are rounded once more, after the norm
    one = x.with_(beta=raw_beta).run(use_beta_sigmoid_in_kernel=True)
    assert_same_bits(one, x.with_(beta=raw_beta.sigmoid()).run(), "sigmoid inside and before")


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("small", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_of_gates_beta_and_state(small, dtype, rng):
    """They are widened, never narrowed: the same bits as from the same values in fp32."""
    x = make_inputs(rng, [70, 65], dtype=dtype)
    x = x.with_(g=x.g.to(small), beta=x.beta.to(small), h0=x.h0.to(small))
    wide = x.with_(g=x.g.float(), beta=x.beta.float(), h0=x.h0.float())
    assert_same_bits(x.run(), wide.run(), f"g, beta and h0 in {small}")
    for name in ("g", "beta", "h0"):
        mixed = wide.with_(**{name: getattr(x, name)})
        assert_same_bits(mixed.run(), wide.run(), f"{name} alone in {small}")


def test_an_fp32_state_is_not_rounded(rng):
    x = make_inputs(rng, 64)
    nothing_happens = x.with_(beta=torch.zeros_like(x.beta), g=torch.zeros_like(x.g))
    _, state = nothing_happens.run()
    assert torch.equal(state, x.h0)


def test_dtypes_of_offsets(rng):
    x = make_inputs(rng, [70, 0, 65])
    assert_same_bits(x.with_(cu=x.cu.long()).run(), x.run(), "int64 offsets")


# Views


def as_view(x: Inputs, kind: str) -> Inputs:
    """The same values behind other strides or addresses."""

    def view(t: torch.Tensor) -> torch.Tensor:
        if kind == "heads first":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == "time first":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if kind == "slice of the last axis":
            return torch.cat([t, t], -1)[..., : t.shape[-1]]
        if kind == "slice of tokens":
            return torch.cat([t[:, :3], t, t[:, :1]], 1)[:, 3:-1]
        if kind == "misaligned":
            whole = t.new_empty(t.numel() + 1)
            whole[1:] = t.flatten()
            return whole[1:].view(t.shape)
        if kind == "every second":
            return torch.stack([t, t + 1], -1).flatten(-2)[..., ::2]
        raise ValueError(kind)

    h0 = x.h0.transpose(0, 1).contiguous().transpose(0, 1) if kind == "heads first" else view(x.h0)
    return Inputs(*(view(t) for t in x.tensors), h0, x.cu)


KINDS = ["heads first", "time first", "slice of the last axis", "slice of tokens", "misaligned", "every second"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [[70, 65], 70], ids=str)
def test_views_give_the_same_bits(tokens, kind, rng):
    x = make_inputs(rng, tokens, batch=1 if isinstance(tokens, list) else 8)
    assert_same_bits(as_view(x, kind).run(), x.run(), kind)


def test_split_and_expanded_views(rng):
    x = make_inputs(rng, [70, 65], (4, 4))
    joined = torch.cat([x.q, x.k, x.v], -1)
    q, k, v = joined.split([128, 128, 128], -1)
    assert_same_bits(x.with_(q=q, k=k, v=v).run(), x.run(), "split from one projection")
    shared = x.with_(
        k=x.k[:, :, :1].expand(-1, -1, 4, -1), beta=x.beta[:, :, :1].expand(-1, -1, 4), g=x.g[:, :1].expand(-1, 135, -1),
        h0=x.h0[:1].expand(2, -1, -1, -1),
    )  # fmt: skip
    plain = Inputs(*(t.contiguous() for t in shared.tensors), shared.h0.contiguous(), x.cu)
    assert_same_bits(shared.run(), plain.run(), "expanded")


def test_inputs_are_left_alone_and_outputs_are_new(rng):
    x = make_inputs(rng, [70, 65])
    copies = [t.clone() for t in (*x.tensors, x.h0, x.cu)]
    o, state = x.run()
    for t, copy in zip((*x.tensors, x.h0, x.cu), copies, strict=True):
        assert torch.equal(t, copy)
    assert o.is_contiguous() and state.is_contiguous()
    assert state.data_ptr() != x.h0.data_ptr()


# Paths without kernels


@pytest.mark.parametrize("reason", ["fp32", "fp64", "head size 256"])
def test_pytorch_path_with_one_warning(reason, rng, warnings_not_given_yet):
    dims = (256, 128) if reason == "head size 256" else (128, 128)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(reason, torch.bfloat16)
    x = make_inputs(rng, [70, 65], dims=dims, dtype=dtype)
    said = qla.unsupported_reason(*x.tensors)
    assert said
    options = {"initial_state": x.h0, "output_final_state": True, "cu_seqlens": x.cu}
    with pytest.warns(RuntimeWarning) as seen:
        o, state = qla.chunk_gated_delta_rule(*x.tensors, **options)
    assert len([w for w in seen if said in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qla.chunk_gated_delta_rule(*x.tensors, **options)
    for actual, exact in zip((o, state), x.exact(), strict=True):
        assert relative(actual, exact) < (FLOOR[torch.bfloat16] if dtype == torch.bfloat16 else 1e-5)


def test_no_warning_where_the_kernels_run(rng, warnings_not_given_yet):
    if DEVICE == "cpu":
        pytest.skip("the PyTorch path warns")
    x = make_inputs(rng, [70, 65])
    assert qla.unsupported_reason(*x.tensors) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.run()


def test_pytorch_path_on_the_gpu_agrees_with_the_kernels(rng, monkeypatch):
    x = make_inputs(rng, [130, 65])
    o, state = chunked_gated_delta_rule(*x.tensors, None, x.h0, True, False, x.cu)
    for actual, other in zip(x.run(), (o, state), strict=True):
        assert relative(actual, other) < FLOOR[torch.bfloat16]


# Errors


def test_errors_come_before_a_launch(rng, monkeypatch):
    x = make_inputs(rng, [70, 65])
    with pytest.raises(ValueError, match="cu_seqlens_cpu"):
        x.run(cu_seqlens_cpu=torch.tensor([0, 90, 70], dtype=torch.int32))
    monkeypatch.setenv("QLA_DEBUG", "1")
    for bad in ([0, 90, 70], [1, 70, 135], [0, 70, 136]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            x.with_(cu=torch.tensor(bad, dtype=torch.int32, device=DEVICE)).run()
    monkeypatch.delenv("QLA_DEBUG")
    with pytest.raises(ValueError, match="g must"):
        x.with_(g=x.g[:, :-1]).run()
    with pytest.raises(TypeError, match="dtype"):
        x.with_(k=x.k.half()).run()
    with pytest.raises(ValueError, match="scale"):
        x.run(scale=float("nan"))
    if DEVICE != "cpu":
        with pytest.raises(ValueError, match="device"):
            x.with_(beta=x.beta.cpu()).run()
    with pytest.raises(NotImplementedError):
        x.run(cp_context=object())
    assert_accurate(x, x.run())


# Gradients: the forward by the kernels, the backward in PyTorch


def with_gradients(x: Inputs, names: tuple[str, ...]) -> Inputs:
    return x.with_(**{name: getattr(x, name).detach().clone().requires_grad_() for name in names})


def gradients(x: Inputs, names: tuple[str, ...], do: torch.Tensor | None, dht: torch.Tensor | None, call=None) -> dict[str, torch.Tensor]:
    x = with_gradients(x, names)
    o, state = (call or Inputs.run)(x)
    outputs = [(t, d) for t, d in ((o, do), (state, dht)) if d is not None]
    leaves = [getattr(x, name) for name in names]
    found = torch.autograd.grad([t for t, _ in outputs], leaves, [d.to(t.dtype) for t, d in outputs], allow_unused=True)
    return {name: torch.zeros_like(leaf) if d is None else d for name, leaf, d in zip(names, leaves, found, strict=True)}


ALL = ("q", "k", "v", "g", "beta", "h0")


@pytest.mark.filterwarnings("ignore:qla has no backward kernel")
@pytest.mark.parametrize("losses", ["both", "o", "state"])
@pytest.mark.parametrize("tokens", [[70, 0, 65], 100], ids=str)
def test_gradients(tokens, losses, rng):
    x = make_inputs(rng, tokens)
    do = torch.randn(x.v.shape, generator=rng).to(DEVICE) if losses != "state" else None
    dht = torch.randn(x.h0.shape, generator=rng).to(DEVICE) if losses != "o" else None
    got = gradients(x, ALL, do, dht)
    wide = Inputs(*(t.double() for t in x.tensors), x.h0.double(), x.cu)
    # do as the kernels' o receives it: rounded to o's dtype
    rounded_do = None if do is None else do.to(x.q.dtype).double()
    allowed = {"q": 1e-2, "k": 1e-2, "v": 1e-2, "g": 2e-2, "beta": 2e-2, "h0": 1e-2}
    expected = gradients(wide, ALL, rounded_do, dht, Inputs.exact)
    for name in ALL:
        assert got[name].dtype == getattr(x, name).dtype
        error = relative(got[name], expected[name])
        assert error < allowed[name], f"d{name}: {error:.2e}"


@pytest.mark.filterwarnings("ignore:qla has no backward kernel")
def test_gradients_of_some_inputs_and_under_checkpointing(rng):
    x = make_inputs(rng, [70, 65])
    do = torch.randn(x.v.shape, generator=rng).to(DEVICE)
    every = gradients(x, ALL, do, None)
    for name in ALL:
        alone = gradients(x, (name,), do, None)
        assert relative(alone[name], every[name]) < 1e-6, name
    y = with_gradients(x, ALL)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return qla.chunk_gated_delta_rule(*tensors[:5], initial_state=tensors[5], cu_seqlens=x.cu)[0]

    o = checkpoint(call, *(getattr(y, name) for name in ALL), use_reentrant=False)
    o.backward(do.to(o.dtype))
    for name in ALL:
        assert relative(getattr(y, name).grad, every[name]) < 1e-6, name


@pytest.mark.filterwarnings("ignore:qla has no backward kernel")
def test_no_gradient_for_rows_that_no_sequence_owns(rng):
    x = make_inputs(rng, 120).with_(cu=cu_of([70]))
    do = torch.ones(x.v.shape, device=DEVICE)
    for name, grad in gradients(x, ALL, do, None).items():
        assert torch.isfinite(grad).all(), name
        if name != "h0":
            assert bool((grad[:, 70:] == 0).all()), name


def test_no_gradient_mode_keeps_nothing(rng):
    x = with_gradients(make_inputs(rng, 70), ALL)
    with torch.no_grad():
        o, state = x.run()
    assert not o.requires_grad and not state.requires_grad
