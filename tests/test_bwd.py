"""The gradients against float64: head counts, tails, losses, states, gates, keys, scales, head sizes, packed sequences, dtypes, views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gradients import (
    FLOORS,
    NAMES,
    Gradients,
    Losses,
    assert_gradients_accurate,
    assert_same_gradients,
    exact_gradients,
    gradients_of,
    leaves_of,
    make_losses,
)
from problems import (
    DEVICE,
    GATES,
    NAN_FILLED,
    NARROW,
    VIEWS,
    Inputs,
    as_view,
    assert_same_bits,
    cu_of,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    near_equal_keys,
    relative,
    views_of,
    with_garbage_rows,
)

import qla

pytestmark = gpu_marks(NAN_FILLED)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TAILS = [1, 63, 64, 65, 130, 191]


def check(x: Inputs, rng: torch.Generator, scale: float | None = None) -> tuple[Gradients, Gradients]:
    """All gradients of x for random losses against float64; returns (gradients, exact ones)."""
    losses = make_losses(rng, x)
    got = gradients_of(x, losses, lambda y: y.run(scale=scale))
    return got, assert_gradients_accurate(x, losses, got, scale)


# Shapes


@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 6), (3, 3), (4, 32)], ids=str)
def test_head_counts(heads, rng):
    check(make_inputs(rng, 150, heads, batch=2), rng)


@pytest.mark.parametrize("heads", [(1, 3), (2, 2), (2, 8)], ids=str)
def test_head_counts_fp16_packed(heads, rng):
    check(make_inputs(rng, [70, 1, 129], heads, dtype=torch.float16), rng)


@DTYPES
@pytest.mark.parametrize("gates", GATES)
def test_packed_with_tails(gates, dtype, rng):
    check(make_inputs(rng, [*TAILS, 0, 512], dtype=dtype, gates=gates), rng)


@DTYPES
@pytest.mark.parametrize("tokens", [[64, 1, 0, 70], 200], ids=str)
def test_against_the_recurrence(tokens, dtype, rng):
    """The oracle token by token: nothing in common with the chunked algebra."""
    x = make_inputs(rng, tokens, dtype=dtype)
    losses = make_losses(rng, x)
    expected = exact_gradients(x, losses, chunked=False)
    assert_gradients_accurate(x, losses, gradients_of(x, losses), expected=expected)


@pytest.mark.parametrize("tokens", [*TAILS, 512])
def test_equal_lengths(tokens, rng):
    check(make_inputs(rng, tokens, (1, 4), batch=3), rng)


@pytest.mark.parametrize("gates", GATES)
def test_long_sequence(gates, rng):
    check(make_inputs(rng, 4096 + 37, (1, 2), gates=gates), rng)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [33, 140])
def test_full_card(batch, dtype, rng):
    """As many items as multiprocessors, and several waves."""
    check(make_inputs(rng, 100, (2, 4), batch=batch if DEVICE != "cpu" else 5, dtype=dtype), rng)


DIMS = [*NARROW, (96, 96), (80, 112), (32, 16), (60, 60), (100, 60)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_sizes(dims, rng):
    x = make_inputs(rng, [100, 64], dims=dims)
    assert DEVICE == "cpu" or qla.unsupported_reason(*x.tensors) is None
    check(x, rng)


@DTYPES
@pytest.mark.parametrize("heads", [(2, 4), (2, 8), (3, 3)], ids=str)
@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_narrow_heads(dims, heads, dtype, rng):
    """Ragged lengths with all kinds of gates; the backward kernel leaves out its second half of K, of V, or of either."""
    for gates in GATES:
        check(make_inputs(rng, [*TAILS, 0, 512], heads, dims=dims, dtype=dtype, gates=gates), rng)


@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_narrow_heads_fill_the_card(dims, rng):
    check(make_inputs(rng, 100, (2, 4), batch=140 if DEVICE != "cpu" else 5, dims=dims), rng)


@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_rows_without_owner_of_narrow_heads(dims, rng):
    x = make_inputs(rng, [70, 64], dims=dims)
    losses = make_losses(rng, x)
    longer = with_garbage_rows(x, 70, torch.nan)
    got = gradients_of(longer, losses._replace(do=torch.nn.functional.pad(losses.do, (0, 0, 0, 0, 0, 70), value=1.0)))
    for name in ("q", "k", "v", "g", "beta"):
        assert bool((got[name][:, 134:] == 0).all()), name
    expected = gradients_of(x, losses)
    assert_same_gradients({name: d[:, :134] if name != "h0" else d for name, d in got.items()}, expected, "garbage past the end")


@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_narrow_heads_repeat(dims, rng):
    x = make_inputs(rng, [130, 65, 1, 700], (2, 8), dims=dims, gates="mixed")
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    for _ in range(200 if DEVICE != "cpu" else 2):
        assert_same_gradients(gradients_of(x, losses), expected, "again")


# Losses and states


@pytest.mark.parametrize("losses", ["both", "o", "state"])
@pytest.mark.parametrize("state", [True, False], ids=["h0", "no h0"])
@pytest.mark.parametrize("tokens", [[70, 0, 65], 100], ids=str)
def test_losses(tokens, state, losses, rng):
    x = make_inputs(rng, tokens, state=state)
    given = make_losses(rng, x)
    given = {"both": given, "o": given._replace(dht=None), "state": given._replace(do=None)}[losses]
    got = gradients_of(x, given)
    assert_gradients_accurate(x, given, got)
    zeros = Losses(*(torch.zeros_like(full) if d is None else d for d, full in zip(given, make_losses(rng, x), strict=True)))
    assert_same_gradients(got, gradients_of(x, zeros), "a loss that does not depend on a result, and one with zero gradient")
    if losses == "o":
        without = gradients_of(x, given, lambda y: y.run(output_final_state=False))
        assert_same_gradients(without, got, "without a final state")
    if losses == "state":
        assert bool((got["q"] == 0).all()), "the state does not depend on q"


def transposed_run(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return x.run(state_v_first=True)


@pytest.mark.parametrize("dims", [(128, 128), (80, 112), *NARROW], ids=str)
@pytest.mark.parametrize("tokens", [130, [64, 0, 77]], ids=str)
def test_state_layouts_are_transposes(tokens, dims, rng):
    x = make_inputs(rng, tokens, dims=dims)
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    flipped = x.with_(h0=x.h0.transpose(-1, -2).contiguous())
    got = gradients_of(flipped, losses._replace(dht=losses.dht.transpose(-1, -2).contiguous()), transposed_run)
    got["h0"] = got["h0"].transpose(-1, -2)
    assert_same_gradients(got, expected, "V-first")
    got = gradients_of(x.with_(h0=None), losses._replace(dht=losses.dht.transpose(-1, -2)), transposed_run)
    assert_same_gradients(got, gradients_of(x.with_(h0=None), losses), "V-first without initial state")


@pytest.mark.parametrize("tokens", [130, [64, 0, 77]], ids=str)
def test_no_initial_state_is_a_zero_one(tokens, rng):
    x = make_inputs(rng, tokens)
    x = x.with_(h0=torch.zeros_like(x.h0))
    losses = make_losses(rng, x)
    got = gradients_of(x, losses)
    got.pop("h0")
    assert_same_gradients(gradients_of(x.with_(h0=None), losses), got, "no initial state and a zero one")


@pytest.mark.parametrize("lengths", [[0], [0, 64], [64, 0, 64], [0, 1, 0, 0, 65, 0]], ids=str)
def test_empty_sequences_pass_the_state_gradient_on(lengths, rng):
    x = make_inputs(rng, lengths)
    losses = make_losses(rng, x)
    got = gradients_of(x, losses)
    assert_gradients_accurate(x, losses, got)
    only_o = gradients_of(x, losses._replace(dht=None))
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got["h0"][n], losses.dht[n]), f"dh0 of the empty sequence {n}"
            assert bool((only_o["h0"][n] == 0).all()), f"dh0 of the empty sequence {n} without a loss on the state"


@pytest.mark.parametrize("batch", [1, 3])
def test_no_tokens(batch, rng):
    x = make_inputs(rng, 0, batch=batch)
    losses = make_losses(rng, x)
    for y in [x, x.with_(cu=cu_of([0]))] if batch == 1 else [x]:
        got = gradients_of(y, losses)
        assert torch.equal(got["h0"], losses.dht)
        assert all(got[name].shape == getattr(x, name).shape for name in NAMES)


@pytest.mark.parametrize("dims", [(128, 128), (80, 112)], ids=str)
@pytest.mark.parametrize("lengths, count", [([100], 1), ([64, 37], 200), ([1], 63), ([128], 64)], ids=str)
def test_rows_past_the_last_sequence(lengths, count, dims, rng):
    """They may hold NaN, and so may do: their gradients are 0, and nobody's bits change."""
    x = make_inputs(rng, lengths, (1, 4), dims=dims)
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    garbage = losses.do.new_full((1, count, *losses.do.shape[2:]), float("nan"))
    longer = losses._replace(do=torch.cat([losses.do, garbage], 1))
    for scale in (None, -1.0):
        got = gradients_of(with_garbage_rows(x, count, float("nan")), longer, lambda y, s=scale: y.run(scale=s))
        for name in NAMES[:-1]:
            behind = got[name][:, sum(lengths) :]
            assert bool((behind == 0).all()), f"d{name} of rows that no sequence owns"
            got[name] = got[name][:, : sum(lengths)]
        if scale is None:
            assert_same_gradients(got, expected, f"{count} rows of NaN behind")


def test_all_rows_unowned(rng):
    x = make_inputs(rng, 70).with_(cu=cu_of([0]))
    losses = make_losses(rng, x)
    got = gradients_of(x, losses)
    assert torch.equal(got.pop("h0"), losses.dht)
    assert all(bool((d == 0).all()) for d in got.values())


# Gates


@DTYPES
@pytest.mark.parametrize("gate", [-20.0, -50.0, -300.0, -1e4])
def test_strong_gates(gate, dtype, rng):
    x = make_inputs(rng, [7, 50, 64, 65, 130], dtype=dtype)
    check(x.with_(g=torch.full_like(x.g, gate)), rng)


@DTYPES
def test_some_tokens_forget_almost_everything(dtype, rng):
    x = make_inputs(rng, 700, dtype=dtype)
    strong = (torch.rand(x.g.shape, generator=rng) < 0.01).to(x.g.device)
    got, expected = check(x.with_(g=torch.where(strong, -1e4, x.g)), rng)
    assert bool((expected["g"][strong] == 0).all())
    # what is left of sums that cancel in fp32
    least = 1e-6 * float(expected["g"].abs().max())
    assert bool((got["g"][strong].abs() <= least).all()), "nothing passes a gate of -1e4, so nothing depends on it"


@DTYPES
@pytest.mark.parametrize("places", [[0], [63], [64], [129], [10, 11], [0, 64, 128], list(range(130))], ids=lambda p: str(p)[:16])
def test_hard_reset(places, dtype, rng):
    """g = -inf: no (-inf) - (-inf), no 0 * inf, in any gradient."""
    x = make_inputs(rng, 130, dtype=dtype)
    g = x.g.clone()
    g[:, places] = float("-inf")
    check(x.with_(g=g), rng)


def test_reset_of_single_heads(rng):
    x = make_inputs(rng, [130, 65], (2, 8))
    g = x.g.clone()
    g[:, 40, ::2] = float("-inf")
    g[:, 140, 1::2] = float("-inf")
    check(x.with_(g=g), rng)


def test_a_hard_reset_stops_the_gradient(rng):
    """Losses after the reset do not reach the tokens before it."""
    x = make_inputs(rng, 200)
    g = x.g.clone()
    g[:, 100] = float("-inf")
    losses = make_losses(rng, x)
    late = losses.do.clone()
    late[:, :100] = 0
    got = gradients_of(x.with_(g=g), Losses(late, losses.dht))
    for name in ("q", "k", "v", "beta"):
        after = float(got[name][:, 100:].double().norm())
        assert float(got[name][:, :100].double().norm()) <= 1e-5 * after, f"d{name} before the reset"
    assert bool((got["h0"] == 0).all())


@DTYPES
@pytest.mark.parametrize("gate", [0.05, 0.01])
def test_growth(gate, dtype, rng):
    x = make_inputs(rng, 512, (1, 2), dtype=dtype)
    # e^25 in all; in fp16 a tenth of the gate keeps within its range
    check(x.with_(g=torch.full_like(x.g, gate if dtype == torch.bfloat16 else gate / 10)), rng)


@DTYPES
@pytest.mark.parametrize("largest", [1.0, 4.0, 16.0])
def test_gradient_of_strong_gates(largest, dtype, rng):
    """Gates as models have them, -A softplus(x) with A up to 16: dg within 1e-2, in each head."""
    x = make_inputs(rng, [300, 212], (2, 4), dtype=dtype)
    rates = largest * torch.tensor([1.0, 0.5, 0.1, 0.01])
    x = x.with_(g=(-rates * F.softplus(torch.randn(x.g.shape, generator=rng))).to(x.g.device))
    got, expected = check(x, rng)
    for head in range(4):
        error = relative(got["g"][..., head], expected["g"][..., head])
        assert error <= 1e-2, f"dg with A = {rates[head]:.2f}: {error:.2e}"


@pytest.mark.parametrize("slow", [0.0, -1e-6, -1e-4])
def test_heads_that_decay_beside_heads_that_do_not(slow, rng):
    x = make_inputs(rng, 512, (2, 4))
    g = x.g.clone()
    g[..., 1::2] = slow
    check(x.with_(g=g, h0=x.h0 * 100), rng)


# Keys, beta, scale, range


@DTYPES
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, "up to 2"])
def test_nearly_equal_keys(beta, spread, dtype, rng):
    check(near_equal_keys(rng, beta, spread, dtype, (130, 65)), rng)


def test_beta_zero_and_one(rng):
    x = make_inputs(rng, 130)
    zero = x.with_(beta=torch.zeros_like(x.beta), g=torch.zeros_like(x.g))
    got, _ = check(zero, rng)
    assert all(bool((got[name] == 0).all()) for name in ("k", "v")), "nothing is written with beta = 0"
    assert bool((got["beta"] != 0).any()), "beta's own gradient does not divide by beta"
    check(x.with_(beta=torch.ones_like(x.beta)), rng)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0, -0.5])
def test_scale(scale, rng):
    got, _ = check(make_inputs(rng, [130, 64]), rng, scale)
    if scale == 0:
        assert bool((got["q"] == 0).all())


def test_default_scale(rng):
    x = make_inputs(rng, [130, 64])
    losses = make_losses(rng, x)
    got = gradients_of(x, losses, lambda y: y.run(scale=128**-0.5))
    assert_same_gradients(got, gradients_of(x, losses), "default scale")


@DTYPES
@pytest.mark.parametrize("inside", [True, False], ids=["l2norm inside", "zero keys"])
def test_padding_tokens(inside, dtype, rng):
    """Rows with q = k = v = 0, single ones and a long tail: no 0/0, with the norm taken inside too."""
    x = make_inputs(rng, 200, dtype=dtype)
    padding = (torch.rand(200, generator=rng) < 0.2).to(x.q.device) | (torch.arange(200, device=x.q.device) >= 150)
    q, k, v = (torch.where(padding.view(1, -1, 1, 1), 0, t) for t in (x.q, x.k, x.v))
    x = x.with_(q=q, k=k, v=v, g=x.g * 0.05)
    losses = make_losses(rng, x)
    if not inside:
        got = gradients_of(x, losses)
        assert_gradients_accurate(x, losses, got)
        return
    got = gradients_of(x, losses, lambda y: y.run(use_qk_l2norm_in_kernel=True))

    def exact(y: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (y.q, y.k))
        return y.with_(q=q, k=k).exact(chunked=True)

    expected = gradients_of(Inputs(*(t.double() for t in x.tensors), x.h0.double()), losses, exact)
    for name in NAMES:
        error = relative(got[name], expected[name])
        assert error <= 2 * FLOORS[dtype][name], f"d{name}: {error:.2e}"


def test_large_and_small_values(rng):
    x = make_inputs(rng, [130, 64], gates="none")
    check(x.with_(h0=x.h0 * 1e6, v=x.v * 1e3), rng)
    check(x.with_(h0=x.h0 * 1e-12, v=x.v * 1e-12), rng)
    losses = make_losses(rng, x)
    for factor in (1e8, 1e-8):
        scaled = Losses(losses.do * factor, losses.dht * factor)
        assert_gradients_accurate(x, scaled, gradients_of(x, scaled))


# Dtypes and views


@DTYPES
@pytest.mark.parametrize("small", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_gates_beta_and_state(small, dtype, rng):
    """Computed in fp32 and rounded once to the input's dtype: the bits of an fp32 input's gradient, rounded."""
    x = make_inputs(rng, [70, 65], dtype=dtype)
    losses = make_losses(rng, x)
    x = x.with_(g=x.g.to(small), beta=x.beta.to(small), h0=x.h0.to(small))
    wide = gradients_of(x.with_(g=x.g.float(), beta=x.beta.float(), h0=x.h0.float()), losses)
    rounded = {name: d.to(getattr(x, name).dtype) for name, d in wide.items()}
    assert_same_gradients(gradients_of(x, losses), rounded, f"g, beta and h0 in {small}")
    for name in ("g", "beta", "h0"):
        mixed = x.with_(**{other: getattr(x, other).float() for other in ("g", "beta", "h0") if other != name})
        assert_same_gradients(gradients_of(mixed, losses), wide | {name: rounded[name]}, f"{name} alone in {small}")


def test_dtypes_of_offsets(rng):
    x = make_inputs(rng, [70, 0, 65])
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    assert_same_gradients(gradients_of(x.with_(cu=x.cu.long()), losses), expected, "int64 offsets")
    copied = gradients_of(x, losses, lambda y: y.run(cu_seqlens_cpu=y.cu.cpu()))
    assert_same_gradients(copied, expected, "with a copy of the offsets on the CPU")


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("tokens", [[70, 65], 70], ids=str)
def test_views_give_the_same_bits(tokens, kind, rng):
    """Inputs, do and dht behind other strides and addresses."""
    x = make_inputs(rng, tokens, batch=1 if isinstance(tokens, list) else 4)
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    assert_same_gradients(gradients_of(views_of(x, kind), losses), expected, f"inputs: {kind}")
    viewed = Losses(as_view(losses.do, kind), as_view(losses.dht, "time first" if kind == "heads first" else kind))
    assert_same_gradients(gradients_of(x, viewed), expected, f"do and dht: {kind}")


def test_expanded_gradients_of_the_results(rng):
    """Stride 0, as a sum or a mean gives them."""
    x = make_inputs(rng, [70, 65], (4, 4))
    ones = Losses(torch.ones_like(x.v), torch.ones_like(x.h0))
    expected = gradients_of(x, ones)
    expanded = Losses(ones.do.flatten()[0].expand_as(x.v), ones.dht.flatten()[0].expand_as(x.h0))
    assert expanded.do.stride() == (0, 0, 0, 0)
    assert_same_gradients(gradients_of(x, expanded), expected, "expanded do and dht")
    leaves = leaves_of(x)
    o, state = leaves.run()
    (o.sum(dtype=torch.float32) + state.sum()).backward()
    assert_same_gradients({name: getattr(leaves, name).grad for name in NAMES}, expected, "sums")
    normal = make_losses(rng, x)
    shared = Losses(normal.do[:, :, :1].expand_as(x.v), normal.dht[:1].expand_as(x.h0))
    plain = Losses(*(d.contiguous() for d in shared))
    assert_same_gradients(gradients_of(x, shared), gradients_of(x, plain), "expanded over heads and sequences")


def test_split_and_expanded_inputs(rng):
    x = make_inputs(rng, [70, 65], (4, 4))
    losses = make_losses(rng, x)
    joined = torch.cat([x.q, x.k, x.v], -1).requires_grad_()
    q, k, v = joined.split([128, 128, 128], -1)
    results = x.with_(q=q, k=k, v=v).run()
    (got,) = torch.autograd.grad(results, joined, tuple(losses))
    each = gradients_of(x, losses)
    assert_same_bits([got], [torch.cat([each["q"], each["k"], each["v"]], -1)], "split from one projection", ["d(qkv)"])
    shared = x.with_(
        k=x.k[:, :, :1].expand(-1, -1, 4, -1), beta=x.beta[:, :, :1].expand(-1, -1, 4), g=x.g[:, :1].expand(-1, 135, -1),
        h0=x.h0[:1].expand(2, -1, -1, -1),
    )  # fmt: skip
    plain = Inputs(*(t.contiguous() for t in shared.tensors), shared.h0.contiguous(), x.cu)
    assert_same_gradients(gradients_of(shared, losses), gradients_of(plain, losses), "expanded")


def test_inputs_and_losses_are_left_alone(rng):
    x = make_inputs(rng, [70, 65])
    losses = make_losses(rng, x)
    tensors = (*x.tensors, x.h0, x.cu, *losses)
    copies = [t.clone() for t in tensors]
    got = gradients_of(x, losses)
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
    assert len({d.data_ptr() for d in (*got.values(), *tensors)}) == len(got) + len(tensors)


# Activations


@pytest.mark.parametrize("with_bias", [True, False], ids=["dt_bias", "no dt_bias"])
def test_activations_inside(with_bias, rng):
    """l2norm, the sigmoid of beta, negative eigenvalues and the gate with its parameters, against the same done in float64."""
    x = make_inputs(rng, [130, 65])
    raw_beta, raw_g = (torch.randn(x.g.shape, generator=rng).to(DEVICE) for _ in range(2))
    A_log, dt_bias = (torch.randn(4, generator=rng).to(DEVICE) for _ in range(2))
    raw = x.with_(q=3 * x.q, k=0.3 * x.k, beta=raw_beta, g=raw_g)
    losses = make_losses(rng, x)

    def all_gradients(inputs: Inputs, parameters: list[torch.Tensor], call) -> list[torch.Tensor]:
        leaves = leaves_of(inputs)
        parameters = [p.detach().requires_grad_() for p in parameters]
        results = call(leaves, *parameters)
        wanted = [*(getattr(leaves, name) for name in NAMES), *parameters]
        return list(torch.autograd.grad(results, wanted, [d.to(r.dtype) for d, r in zip(losses, results, strict=True)]))

    def ours(y: Inputs, A: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return y.run(
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
            use_gate_in_kernel=True, A_log=A, dt_bias=bias,
        )  # fmt: skip

    def exact(y: Inputs, A: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (y.q, y.k))
        g = -A.exp() * F.softplus(y.g if bias is None else y.g + bias)
        return Inputs(q, k, y.v, g, 2 * y.beta.sigmoid(), y.h0, y.cu).exact(chunked=True)

    parameters = [A_log, dt_bias] if with_bias else [A_log]
    got = all_gradients(raw, parameters, ours)
    wide = Inputs(*(t.double() for t in raw.tensors), raw.h0.double(), raw.cu)
    expected = all_gradients(wide, [p.double() for p in parameters], exact)
    floors = [*(FLOORS[torch.bfloat16][name] for name in NAMES), 2e-2, 2e-2]
    for name, actual, reference, floor in zip((*NAMES, "A_log", "dt_bias"), got, expected, floors, strict=False):
        error = relative(actual, reference)
        assert error <= 2 * floor, f"d{name}: {error:.2e}"  # q and k are rounded once more, after the norm


def test_sigmoid_inside_and_before(rng):
    x = make_inputs(rng, [70, 65])
    x = x.with_(beta=torch.randn(x.g.shape, generator=rng).to(DEVICE))
    losses = make_losses(rng, x)
    got = gradients_of(x, losses, lambda y: y.run(use_beta_sigmoid_in_kernel=True))
    before = gradients_of(x, losses, lambda y: y.with_(beta=y.beta.sigmoid()).run())
    for name in NAMES:  # beta's is differentiated by another formula than PyTorch's
        assert relative(got[name], before[name]) <= (1e-6 if name == "beta" else 0), name


# The low-level entry


@DTYPES
@pytest.mark.parametrize("state_v_first", [False, True], ids=["K-first", "V-first"])
@pytest.mark.parametrize("with_dht", [True, False], ids=["dht", "no dht"])
@pytest.mark.parametrize("tokens", [[100, 0, 64, 3], 100], ids=str)
def test_low_level_entry(tokens, with_dht, state_v_first, dtype, rng):
    """The bits of autograd, dg and dbeta in fp32."""
    if DEVICE == "cpu" and not hasattr(qla, "chunk_gated_delta_rule_bwd"):
        pytest.skip("no low-level entry on the PyTorch path")
    x = make_inputs(rng, tokens, (2, 4), batch=1 if isinstance(tokens, list) else 2, dtype=dtype)
    losses = make_losses(rng, x)
    if not with_dht:
        losses = losses._replace(dht=None)
    kept = losses
    if state_v_first:
        x = x.with_(h0=x.h0.transpose(-1, -2).contiguous())
        losses = losses._replace(dht=losses.dht.transpose(-1, -2).contiguous() if with_dht else None)
    for y in (x, x.with_(h0=None)):
        g_cum, A, _, _ = qla.chunk_gated_delta_rule_fwd(*y.tensors, None, y.h0, True, y.cu, None, state_v_first)
        q, k, v, _, beta = y.tensors
        grads = qla.chunk_gated_delta_rule_bwd(
            q, k, v, g_cum, beta, A, None, y.h0, losses.do, losses.dht, cu_seqlens=y.cu, state_v_first=state_v_first
        )
        got = dict(zip(NAMES, grads, strict=True))
        if y.h0 is None:
            assert got.pop("h0") is None
        assert got["g"].dtype == got["beta"].dtype == torch.float32
        if DEVICE == "cpu":
            z = y if y.h0 is None or not state_v_first else y.with_(h0=y.h0.transpose(-1, -2))
            if state_v_first and "h0" in got:
                got["h0"] = got["h0"].transpose(-1, -2)
            assert_gradients_accurate(z, kept, got)
            continue
        expected = gradients_of(y, losses, lambda z: z.run(state_v_first=state_v_first))
        assert_same_gradients(got, expected, "low-level entry and autograd")


def test_low_level_entry_with_other_dtypes_and_unowned_rows(rng):
    """beta in 16 bits still has an fp32 gradient; rows that no sequence owns get zeros."""
    if DEVICE == "cpu" and not hasattr(qla, "chunk_gated_delta_rule_bwd"):
        pytest.skip("no low-level entry on the PyTorch path")
    x = with_garbage_rows(make_inputs(rng, [70, 30]), 50, float("nan"))
    x = x.with_(beta=x.beta.bfloat16())
    losses = make_losses(rng, x)
    losses.do[:, 100:] = float("nan")
    g_cum, A, _, _ = qla.chunk_gated_delta_rule_fwd(*x.tensors, 0.3, x.h0, False, x.cu)
    grads = qla.chunk_gated_delta_rule_bwd(*x.tensors[:3], g_cum, x.beta, A, 0.3, x.h0, losses.do, losses.dht, cu_seqlens=x.cu)
    for name, d in zip(NAMES, grads, strict=True):
        assert d.dtype == (torch.float32 if name in ("g", "beta", "h0") else torch.bfloat16), f"d{name}"
        assert bool(torch.isfinite(d).all()), f"d{name}"
        assert name == "h0" or bool((d[:, 100:] == 0).all()), f"d{name} of rows that no sequence owns"
