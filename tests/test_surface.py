"""The call surface on a GPU: fla's arguments, dtypes, views, paths without kernels, errors before a launch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DEVICE,
    FLOOR,
    NAN_FILLED,
    VIEWS,
    Inputs,
    assert_accurate,
    assert_same_bits,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    views_of,
)

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


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (60, 100)], ids=str)
def test_activations_inside(dims, rng):
    """l2norm, the sigmoid of beta, negative eigenvalues and the gate, against the same done before in float64."""
    x = make_inputs(rng, [130, 65], dims=dims)
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


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("tokens", [[70, 65], 70], ids=str)
def test_views_give_the_same_bits(tokens, kind, rng):
    x = make_inputs(rng, tokens, batch=1 if isinstance(tokens, list) else 8)
    assert_same_bits(views_of(x, kind).run(), x.run(), kind)


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
