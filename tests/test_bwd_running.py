"""How the backward pass runs: wanted gradients only, checkpointing, autocast, memory, workspace, repeats, neighbours, streams, graphs."""

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
    collect,
    exact_gradients,
    gradients_of,
    leaves_of,
    make_losses,
)
from problems import (
    DEVICE,
    NAN_FILLED,
    Inputs,
    assert_same_bits,
    cu_of,
    device_rng,
    free_gigabytes,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    side_load,
    sync_is_an_error,  # noqa: F401
    synchronise,
)
from torch.utils.checkpoint import checkpoint

import qla

pytestmark = gpu_marks()

NEEDS_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
REPEATS = 200 if DEVICE != "cpu" else 3


def grads_of_leaves(leaves: Inputs) -> Gradients:
    return {name: getattr(leaves, name).grad for name in NAMES if getattr(leaves, name) is not None}


def cloned(x: Inputs) -> Inputs:
    return Inputs(*(t.clone() for t in x.tensors), None if x.h0 is None else x.h0.clone(), None if x.cu is None else x.cu.clone())


def backward(results: tuple[torch.Tensor, torch.Tensor], losses: Losses, **options: bool) -> None:
    """Accumulates into the leaves' .grad."""
    torch.autograd.backward(results, tuple(losses), **options)


# What is asked for


@pytest.mark.parametrize("tokens", [[70, 0, 65], 70], ids=str)
def test_only_the_wanted_gradients(tokens, rng):
    x = make_inputs(rng, tokens)
    losses = make_losses(rng, x)
    every = gradients_of(x, losses)
    for names in [*((name,) for name in NAMES), ("q", "v"), ("k", "beta", "h0"), ("g", "h0")]:
        leaves = leaves_of(x, names)
        pairs = [(t, d) for t, d in zip(leaves.run(), losses, strict=True) if t.requires_grad]  # q alone: on a CPU, o alone
        torch.autograd.backward([t for t, _ in pairs], [d for _, d in pairs])
        for name in NAMES:
            grad = getattr(leaves, name).grad
            if name not in names:
                assert grad is None, f"d{name} was not asked for"
            else:
                assert_same_bits([grad], [every[name]], f"asked for {names}", [f"d{name}"])


def test_nothing_is_kept_when_nothing_is_asked_for(rng):
    x = make_inputs(rng, [70, 65])
    saved = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        o, state = x.run()
        assert not o.requires_grad and not state.requires_grad
        with torch.no_grad():
            o, state = leaves_of(x).run()
        assert not o.requires_grad and not state.requires_grad
        with torch.inference_mode():
            x.run()
        assert saved == []
        leaves_of(x).run()
    assert saved != []


@NEEDS_CUDA
@pytest.mark.parametrize("heads", [(4, 4), (4, 16)], ids=str)
def test_saved_bytes(heads, rng):
    """Between forward and backward a token keeps q, k, v and A in 16 bits, g_cum and beta in fp32; the sequences their initial
    states. Of a cut call a chunk keeps at most its bound."""
    tokens, (h, hv) = 4096, heads
    x = leaves_of(make_inputs(rng, [tokens - 1000, 1000], heads))
    losses = make_losses(rng, x)
    collect(x, x.run(), losses)
    given = sum(t.numel() * t.element_size() for t in (*x.tensors, x.h0))
    stated = tokens * (2 * (2 * h * 128 + hv * 128 + hv * 64) + 4 * 2 * hv) + 4 * x.h0.numel()
    bounds = 4 * hv * (tokens // 64 + 3)
    storages: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point():
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = x.run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert sum(storages.values()) <= stated + bounds, f"saved {sum(storages.values())} bytes, stated are {stated} and {bounds}"
    # Of these the inputs were there already (q, k, v, beta, h0): new are g_cum, A and the results.
    new = tokens * hv * (4 + 2 * 64) + bounds + sum(t.numel() * t.element_size() for t in results)
    assert held <= new + 8192, f"{held} bytes are held, {new} are stated ({given} are the inputs)"  # 512-byte blocks, offsets
    grads = collect(x, results, losses)
    del results
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before - sum(d.numel() * d.element_size() for d in grads.values())
    assert left <= 8192, f"{left} bytes outlive the backward pass"


# In a graph with more in it


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(use_reentrant, rng):
    x = make_inputs(rng, [130, 65])
    losses = make_losses(rng, x)
    leaves = leaves_of(x)

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Inputs(*tensors, x.cu).run()

    results = checkpoint(call, *(getattr(leaves, name) for name in NAMES), use_reentrant=use_reentrant)
    backward(results, losses)
    assert_same_gradients(grads_of_leaves(leaves), gradients_of(x, losses), "checkpointed")


def test_accumulation_over_two_micro_batches(rng):
    """Parameters that both micro-batches share get the sum of their gradients."""
    batches = [make_inputs(rng, 100), make_inputs(rng, 77)]
    losses = [make_losses(rng, x) for x in batches]
    h0 = batches[0].h0.clone().requires_grad_()
    A_log, dt_bias = (torch.randn(4, generator=rng).to(DEVICE).requires_grad_() for _ in range(2))
    shared, alone = (h0, A_log, dt_bias), []

    def run(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return x.with_(h0=h0).run(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)

    for x, loss in zip(batches, losses, strict=True):
        alone.append(torch.autograd.grad(run(x), shared, tuple(loss)))
    for x, loss in zip(batches, losses, strict=True):
        backward(run(x), loss)
    expected = [a + b for a, b in zip(*alone, strict=True)]
    assert_same_bits([t.grad for t in shared], expected, "two micro-batches", ("dh0", "dA_log", "ddt_bias"))


def test_the_same_inputs_used_twice(rng):
    x = make_inputs(rng, [70, 65])
    first, second = make_losses(rng, x), make_losses(rng, x)
    leaves = leaves_of(x)
    one, two = leaves.run(), leaves.run(scale=0.3)
    torch.autograd.backward([*one, *two], [*first, *second])
    a, b = gradients_of(x, first), gradients_of(x, second, lambda y: y.run(scale=0.3))
    assert_same_gradients(grads_of_leaves(leaves), {name: a[name] + b[name] for name in NAMES}, "used twice")


def test_one_layer_feeds_the_next(rng):
    """o and the final state of one call are v and the initial state of another."""
    x, y = make_inputs(rng, [70, 65]), make_inputs(rng, [70, 65])
    losses = make_losses(rng, x)

    def two_layers(call) -> tuple[torch.Tensor, torch.Tensor, Inputs, Inputs]:
        below, above = leaves_of(x), leaves_of(y, ("q", "k", "g", "beta"))
        o, state = call(below)
        results = call(above.with_(v=o, h0=state))
        return *results, below, above

    o, state, below, above = two_layers(Inputs.run)
    backward((o, state), losses)

    # By hand: what the layer above says about v and h0 are the losses of the one below.
    middle = x.run()
    upper = gradients_of(y.with_(v=middle[0], h0=middle[1]), losses)
    lower = gradients_of(x, Losses(upper["v"], upper["h0"]))
    assert_same_gradients(grads_of_leaves(below), lower, "the layer below")
    names = ("q", "k", "g", "beta")
    assert_same_bits([getattr(above, n).grad for n in names], [upper[n] for n in names], "the layer above", [f"d{n}" for n in names])
    # And in float64: o is rounded once between the layers.
    exact_below = x.exact(chunked=True)
    exact_upper = exact_gradients(y.with_(v=exact_below[0].to(x.v.dtype), h0=exact_below[1]), losses)
    exact_lower = exact_gradients(x, Losses(exact_upper["v"], exact_upper["h0"]))
    for name in NAMES:
        error = relative(lower[name], exact_lower[name])
        assert error <= 2 * FLOORS[x.q.dtype][name], f"d{name} through two layers: {error:.2e}"


class Layer(torch.nn.Module):
    """A token mixer with fp32 weights: projections, gates, the operation, output projection."""

    def __init__(self, width: int, heads: tuple[int, int], op) -> None:
        super().__init__()
        self.h, self.hv = heads
        self.op = op
        self.qkv = torch.nn.Linear(width, (2 * self.h + self.hv) * 128, bias=False)
        self.gates = torch.nn.Linear(width, 2 * self.hv)
        self.out = torch.nn.Linear(self.hv * 128, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 128)).split([self.h, self.h, self.hv], -2)
        raw_g, beta = self.gates(x).chunk(2, -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        o = self.op(q, k, v, F.logsigmoid(raw_g), beta.sigmoid())[0]
        return self.out(o.flatten(-2))


@pytest.mark.parametrize("mode", ["autocast", "explicit cast"])
def test_module_with_fp32_weights(mode, rng):
    """The op in bf16 between fp32 weights: under autocast, with backward inside and outside of it, and with casts by hand."""
    width, heads = 64, (2, 4)
    x = torch.randn(2, 150, width, generator=rng).to(DEVICE)
    dy = torch.randn(2, 150, width, generator=rng).to(DEVICE)

    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Norms are fp32 under autocast: the op gets 16 bits in both modes.
        o, state = qla.chunk_gated_delta_rule(q.bfloat16(), k.bfloat16(), v.bfloat16(), *gates)
        return o.to(x.dtype), state

    layer = Layer(width, heads, op).to(DEVICE)
    wide = Layer(width, heads, lambda q, k, v, g, beta: Inputs(q, k, v, g, beta).exact(chunked=True)).to(DEVICE, torch.float64)
    wide.load_state_dict({name: t.double() for name, t in layer.state_dict().items()})
    wide(x.double()).backward(dy.double())
    found = []
    # PyTorch's own operations, which are the path on a CPU, follow an autocast that is on during backward.
    for inside in (False, True) if mode == "autocast" and DEVICE != "cpu" else (False,):
        layer.zero_grad()
        if mode == "explicit cast":
            layer(x).backward(dy)
        else:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                y = layer(x)
                assert y.dtype == torch.bfloat16
                if inside:
                    y.backward(dy.bfloat16())
            if not inside:
                y.backward(dy.bfloat16())
        found.append([p.grad.clone() for p in layer.parameters()])
        for (name, p), q in zip(layer.named_parameters(), wide.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            error = relative(p.grad, q.grad)
            assert error <= 2e-2, f"d{name}: {error:.2e}"
    if len(found) == 2:
        assert_same_bits(found[1], found[0], "backward inside and outside of autocast", [name for name, _ in layer.named_parameters()])


@NEEDS_CUDA
def test_autocast_does_not_reach_the_kernels(rng):
    x = make_inputs(rng, [70, 65])
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    leaves = leaves_of(x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        results = leaves.run()
        backward(results, losses)
    assert_same_gradients(grads_of_leaves(leaves), expected, "under autocast")


def test_backward_twice_through_one_graph(rng):
    x = make_inputs(rng, [130, 65])
    losses, others = make_losses(rng, x), make_losses(rng, x)
    leaves = leaves_of(x)
    results = leaves.run()
    first = collect(leaves, results, losses, retain_graph=True)
    collect(leaves, results, others, retain_graph=True)
    assert_same_gradients(collect(leaves, results, losses), first, "the second time")
    with pytest.raises(RuntimeError, match="second time"):
        collect(leaves, results, losses)


@NEEDS_CUDA
def test_a_changed_input_is_noticed(rng):
    """A saved tensor changed in place before backward is an error, not a wrong gradient."""
    x = make_inputs(rng, [70, 65])
    leaves = leaves_of(cloned(x))
    o, _ = leaves.run()
    with torch.no_grad():
        leaves.v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(torch.ones_like(o))


@NEEDS_CUDA
@pytest.mark.parametrize("loss", ["square", "sum"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "l2norm inside"])
def test_differentiating_twice_is_refused(norm, loss, rng):
    """Never a silent zero: a penalty on gradients raises, also where do itself needs no gradient and o has a loss of its own."""
    x = make_inputs(rng, 70)
    leaves = leaves_of(x)
    o, _ = leaves.run(use_qk_l2norm_in_kernel=norm)
    value = o.float().square().sum() if loss == "square" else o.float().sum()
    (dq,) = torch.autograd.grad(value, leaves.q, create_graph=True)
    with pytest.raises(RuntimeError, match="(?i)twice|second"):
        (dq.float().square().sum() + o.float().sum()).backward()


# Workspace


@NEEDS_CUDA
def test_the_limit_is_read_at_each_call(rng, monkeypatch):
    """Set between forward and backward it is the backward pass's, and changes no bit."""
    x = make_inputs(rng, [300, 65], (4, 8))
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    leaves = leaves_of(x)
    results = leaves.run()
    monkeypatch.setenv("QLA_WORKSPACE_BYTES", "1")
    assert_same_gradients(collect(leaves, results, losses), expected, "limited after the forward pass")


@pytest.mark.parametrize("heads", [(4, 4), (5, 10), (3, 9), (1, 8)], ids=str)
@pytest.mark.parametrize("tokens", [[300, 0, 65, 1], 130], ids=str)
def test_slices_of_heads_give_the_same_bits(tokens, heads, rng, monkeypatch):
    """One key head at a time, and slices that do not divide the heads evenly."""
    x = make_inputs(rng, tokens, heads, batch=1 if isinstance(tokens, list) else 2)
    losses = make_losses(rng, x)
    monkeypatch.delenv("QLA_WORKSPACE_BYTES", raising=False)
    expected = gradients_of(x, losses)
    chunks = sum(-(-(end - begin) // 64) for begin, end in x.bounds)
    state = chunks * 128 * 128 * (heads[1] // heads[0])  # elements of one key head's states
    for limit in (1, 2 * state, 4 * state, 8 * state, 12 * state, 20 * state):
        monkeypatch.setenv("QLA_WORKSPACE_BYTES", str(limit))
        assert_same_gradients(gradients_of(x, losses), expected, f"at most {limit} bytes")


@NEEDS_CUDA
def test_workspace_is_bounded_and_freed(rng, monkeypatch):
    """8192 tokens of 16 heads have 67 MB of states in 16 bits: with a limit of 8 MB the peak is lower by most of that."""
    x = leaves_of(make_inputs(rng, 8192, (16, 16)))
    losses = make_losses(rng, x)
    states = 8192 // 64 * 16 * 128 * 128 * 2

    def peak() -> int:
        results = x.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = collect(x, results, losses)
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated() - before
        del grads, results
        return highest

    monkeypatch.delenv("QLA_WORKSPACE_BYTES", raising=False)
    peak()
    whole = peak()
    monkeypatch.setenv("QLA_WORKSPACE_BYTES", str(8 << 20))
    sliced = peak()
    assert sliced <= whole - states // 2, f"peak {sliced} bytes with the limit, {whole} without"


@NAN_FILLED
def test_buffers_are_poisoned_and_overwritten(nan_filled_empty, rng, monkeypatch):  # noqa: F811
    for limit in (None, "1"):
        if limit:
            monkeypatch.setenv("QLA_WORKSPACE_BYTES", limit)
        for heads in ((2, 4), (2, 2), (1, 3)):
            x = make_inputs(rng, [100, 0, 64, 1], heads)
            leaves, losses = leaves_of(x), make_losses(rng, x)
            results = leaves.run()
            forward = len(nan_filled_empty)
            grads = collect(leaves, results, losses)
            # dq, dk, dv, dg and dbeta at least
            assert DEVICE == "cpu" or len(nan_filled_empty) - forward >= 5, "expected qla to allocate the gradients"
            assert all(bool(torch.isfinite(d).all()) for d in grads.values())
            assert_gradients_accurate(x, losses, grads)


# The same bits


def count_differences(got: Gradients, expected: Gradients) -> torch.Tensor:
    """Number of elements with other bits, without waiting for it."""
    integer = {2: torch.int16, 4: torch.int32}
    counts = []
    for name, d in got.items():
        as_integer = integer[d.element_size()]
        counts.append((d.contiguous().view(as_integer) != expected[name].contiguous().view(as_integer)).sum())
    return torch.stack(counts).sum()


# A few items with tails; a full card of whole and ragged chunks.
SHAPES = [([130, 65, 1], (2, 4)), ([700, 512, 1000], (16, 32))]
if DEVICE == "cpu":
    SHAPES = SHAPES[:1]


@pytest.mark.parametrize("lengths, heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repeats(dtype, lengths, heads, rng):
    x = make_inputs(rng, lengths, heads, dtype=dtype)
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    assert int(torch.stack([count_differences(gradients_of(x, losses), expected) for _ in range(REPEATS)]).sum()) == 0


@NEEDS_CUDA
@pytest.mark.parametrize("lengths, heads", SHAPES, ids=str)
def test_repeats_under_load(lengths, heads, rng):
    """Matrix products on another stream take multiprocessors, L2 and bandwidth away at changing times."""
    x = make_inputs(rng, lengths, heads)
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    load = side_load()
    differences = []
    for number in range(REPEATS):
        load(number)
        differences.append(count_differences(gradients_of(x, losses), expected))
    total = int(torch.stack(differences).sum())
    torch.cuda.synchronize()
    assert total == 0


def test_other_shapes_in_between(rng):
    """What an earlier launch left in shared memory or in freed buffers has no say."""
    x = make_inputs(rng, [130, 65, 1])
    losses = make_losses(rng, x)
    others = [make_inputs(rng, [700, 0, 3], (2, 8)), make_inputs(rng, 77, (1, 3), batch=2, dtype=torch.float16)]
    others.append(make_inputs(rng, 64, (3, 3), gates="none"))
    nan = Inputs(*(torch.full_like(t, float("nan")) for t in others[0].tensors), others[0].h0, others[0].cu)
    expected = gradients_of(x, losses)
    for other in (*others, nan):
        gradients_of(other, make_losses(rng, other))
        assert_same_gradients(gradients_of(x, losses), expected, "after another shape")


# Sequences


def of_sequence(x: Inputs, grads: Gradients, n: int) -> Gradients:
    """The part of packed gradients that belongs to sequence n."""
    begin, end = x.bounds[n]
    return {name: d[n : n + 1] if name == "h0" else d.flatten(0, 1)[begin:end].unsqueeze(0) for name, d in grads.items()}


@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("lengths", [[64, 64], [1, 63, 64, 65, 200], [129, 3, 0, 70]], ids=str)
def test_packed_equals_separate(lengths, heads, rng):
    x = make_inputs(rng, lengths, heads)
    losses = make_losses(rng, x)
    packed = gradients_of(x, losses)
    for n in range(len(lengths)):
        alone = gradients_of(x.sequence(n), losses.sequence(x, n))
        assert_same_gradients(of_sequence(x, packed, n), alone, f"sequence {n} alone")


@pytest.mark.parametrize("tokens", [64, 100])
def test_batch_equals_packed(tokens, rng):
    x = make_inputs(rng, tokens, batch=5)
    losses = make_losses(rng, x)
    packed = Inputs(*(t.flatten(0, 1).unsqueeze(0) for t in x.tensors), x.h0, cu_of([tokens] * 5))
    got = gradients_of(packed, losses._replace(do=losses.do.flatten(0, 1).unsqueeze(0)))
    expected = gradients_of(x, losses)
    got = {name: d.view_as(expected[name]) for name, d in got.items()}
    assert_same_gradients(got, expected, "[B, T] and packed")


def test_many_rows_give_the_bits_of_one(rng):
    """A sequence's gradients do not depend on how many others fill the card."""
    count = 140 if DEVICE != "cpu" else 6
    x = make_inputs(rng, 130, (2, 4), batch=count)
    losses = make_losses(rng, x)
    grads = gradients_of(x, losses)
    for n in (0, count // 2, count - 1):
        part = {name: d[n : n + 1] for name, d in grads.items()}
        assert_same_gradients(part, gradients_of(x.sequence(n), losses.sequence(x, n)), f"batch row {n} alone")


@pytest.mark.parametrize("dirty", [0, 1, 2])
def test_nan_stays_in_its_sequence(dirty, rng):
    """Tiles reach over a sequence's end into its neighbours' rows: inputs, states and losses must not leak."""
    lengths = [70, 70, 65]
    x = make_inputs(rng, lengths)
    losses = make_losses(rng, x)
    clean = gradients_of(x, losses)
    y, bad = cloned(x), Losses(losses.do.clone(), losses.dht.clone())
    begin, end = x.bounds[dirty]
    for t in (*y.tensors, bad.do):
        t[:, begin:end] = float("nan")
    y.h0[dirty] = bad.dht[dirty] = float("nan")
    got = gradients_of(y, bad)
    for n in range(3):
        if n != dirty:
            assert_same_gradients(of_sequence(x, got, n), of_sequence(x, clean, n), f"sequence {n} beside NaN in {dirty}")


def test_thousands_of_short_sequences(rng):
    lengths = torch.randint(0, 10, (2048 if DEVICE != "cpu" else 100,), generator=rng).tolist()
    x = make_inputs(rng, lengths, (1, 2))
    losses = make_losses(rng, x)
    assert_gradients_accurate(x, losses, gradients_of(x, losses))


def test_one_long_and_thirty_short(rng):
    lengths = torch.randint(1, 81, (31,), generator=rng).tolist()
    lengths[11] = 3000 if DEVICE != "cpu" else 300
    # not "mixed": after 3000 tokens without decay dg of a tile is so ill conditioned that equally rounded runs differ by half
    x = make_inputs(rng, lengths, (2, 4))
    losses = make_losses(rng, x)
    assert_gradients_accurate(x, losses, gradients_of(x, losses))


@NEEDS_CUDA
@pytest.mark.parametrize("values", [[0, 50, 20, 128], [0, 300], [-64, 128], [2**31 - 1, -(2**31)], [100, 0, 100]], ids=str)
def test_bad_offsets_on_the_device_do_no_harm(values, rng):
    """They may give any gradient, but no crash, no hang, and nothing else overwritten. (sanitize.py looks closer.)"""
    x = make_inputs(rng, 128, state=False)
    losses = make_losses(rng, x)
    clean = gradients_of(x, losses)
    h0 = torch.ones(len(values) - 1, 4, 128, 128, device=DEVICE)
    bad = x.with_(h0=h0, cu=torch.tensor(values, dtype=torch.int32, device=DEVICE))
    dht = torch.ones_like(h0)
    tensors = (*x.tensors, h0, losses.do, dht)
    kept = [t.clone() for t in tensors]
    gradients_of(bad, Losses(losses.do, dht))
    synchronise()
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    assert_same_gradients(gradients_of(x, losses), clean, "a good call after a bad one")


# Streams, graphs, devices


def copy_into(x: Inputs, losses: Losses, other: Inputs, other_losses: Losses) -> None:
    """Other values into x's and losses' own tensors."""
    with torch.no_grad():
        for a, b in zip((*x.tensors, x.h0, x.cu, *losses), (*other.tensors, other.h0, other.cu, *other_losses), strict=True):
            if a is not None:
                a.copy_(b)


@NEEDS_CUDA
@pytest.mark.parametrize("backward_stream", ["the same", "the default"])
def test_runs_on_the_current_stream(backward_stream, rng):
    """On a side stream, behind work that makes the inputs late: on any other stream the kernels would read NaN."""
    x = make_inputs(rng, [130, 65])
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    late = Inputs(*(torch.full_like(t, float("nan")) for t in x.tensors), torch.full_like(x.h0, float("nan")), torch.zeros_like(x.cu))
    late_losses = Losses(*(torch.full_like(d, float("nan")) for d in losses))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        copy_into(late, late_losses, x, losses)
        leaves = leaves_of(late)
        results = leaves.run()
        if backward_stream == "the same":
            got = collect(leaves, results, late_losses)
    if backward_stream != "the same":
        torch.cuda.current_stream().wait_stream(side)
        got = collect(leaves, results, late_losses)
    torch.cuda.synchronize()
    assert_same_gradients(got, expected, "on a side stream")


@NEEDS_CUDA
@pytest.mark.parametrize("limit", [None, "1"], ids=["whole", "sliced"])
def test_graph_replay_with_other_values_and_lengths(limit, rng, monkeypatch):
    """Forward and backward in one capture: a replay reads lengths and values anew, empty sequences and padding rows included."""
    if limit:
        monkeypatch.setenv("QLA_WORKSPACE_BYTES", limit)
    tokens = [[130, 65, 5], [1, 199, 0], [64, 64, 64], [0, 0, 150]]
    cases = []
    for lengths in tokens:
        h0 = torch.randn(3, 4, 128, 128, generator=rng).to(DEVICE)
        case = make_inputs(rng, 200, state=False).with_(h0=h0, cu=cu_of(lengths))
        losses = make_losses(rng, case)
        cases.append((case, losses, gradients_of(case, losses)))
    static, losses = leaves_of(cloned(cases[0][0])), Losses(*(d.clone() for d in cases[0][1]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        collect(static, static.run(), losses)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = collect(static, static.run(), losses)
    for number in (0, 1, 2, 3, 1, 0):
        case, other, expected = cases[number]
        copy_into(static, losses, case, other)
        for d in got.values():
            d.fill_(float("nan"))
        graph.replay()
        assert_same_gradients(got, expected, f"replay with lengths {tokens[number]}")


@NEEDS_CUDA
@pytest.mark.parametrize("dims", [(128, 128), (64, 96)], ids=str)
@pytest.mark.parametrize("tokens", [[70, 0, 65], 100], ids=str)
def test_no_wait_on_the_host(tokens, dims, sync_is_an_error, rng):  # noqa: F811
    x = make_inputs(rng, tokens, dims=dims)
    losses = make_losses(rng, x)
    gradients_of(x, losses)
    torch.cuda.synchronize()
    with sync_is_an_error():
        got = gradients_of(x, losses)
        gradients_of(x, losses._replace(dht=None), lambda y: y.run(scale=-0.3))
        gradients_of(x, losses, lambda y: y.run(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True))
    assert_gradients_accurate(x, losses, got)


@NEEDS_CUDA
def test_the_host_runs_ahead(rng):
    """forward + backward return while the GPU is still busy with earlier work."""
    x = make_inputs(rng, [70, 65])
    losses = make_losses(rng, x)
    gradients_of(x, losses)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    busy.record()
    gradients_of(x, losses)
    assert not busy.query(), "the call waited for work queued before it"
    torch.cuda.synchronize()


@NEEDS_CUDA
@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current(rng):
    x = make_inputs(rng, [130, 65])
    losses = make_losses(rng, x)
    expected = gradients_of(x, losses)
    there = Inputs(*(t.to("cuda:1") for t in x.tensors), x.h0.to("cuda:1"), x.cu.to("cuda:1"))
    with torch.cuda.device(0):
        got = gradients_of(there, Losses(*(d.to("cuda:1") for d in losses)))
        assert torch.cuda.current_device() == 0
    assert all(d.device == torch.device("cuda:1") for d in got.values())
    assert_same_gradients({name: d.to(DEVICE) for name, d in got.items()}, expected, "cuda:1")


# Large


def group(x: Inputs, losses: Losses, key_head: int) -> tuple[Inputs, Losses]:
    """One key head with its value heads."""
    ratio = x.v.shape[2] // x.q.shape[2]
    values = slice(key_head * ratio, (key_head + 1) * ratio)
    q, k = (t[:, :, key_head : key_head + 1] for t in (x.q, x.k))
    v, g, beta = (t[:, :, values] for t in (x.v, x.g, x.beta))
    h0 = None if x.h0 is None else x.h0[:, values]
    return Inputs(q, k, v, g, beta, h0, x.cu), Losses(losses.do[:, :, values], None if losses.dht is None else losses.dht[:, values])


def group_gradients(grads: Gradients, key_head: int, ratio: int) -> Gradients:
    values = slice(key_head * ratio, (key_head + 1) * ratio)
    pick = {"q": slice(key_head, key_head + 1), "k": slice(key_head, key_head + 1), "h0": values}
    return {name: d[:, values] if name == "h0" else d[:, :, pick.get(name, values)] for name, d in grads.items()}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 256 << 20], ids=["default workspace", "256 MB of workspace"])
def test_many_tokens_and_heads(limit, seed, monkeypatch):
    """65536 tokens of 32/64 heads: a few heads have the bits of the same heads run alone."""
    tokens, heads = (65536, (32, 64)) if DEVICE != "cpu" else (300, (4, 8))
    if DEVICE != "cpu" and free_gigabytes() < 30:
        pytest.skip("needs 30 GB of free GPU memory")
    if limit:
        monkeypatch.setenv("QLA_WORKSPACE_BYTES", str(limit))
    rng = device_rng(seed)
    x = make_inputs(rng, [tokens - tokens // 4, tokens // 4], heads)
    losses = make_losses(rng, x)
    grads = gradients_of(x, losses)
    assert all(bool(torch.isfinite(d).all()) for d in grads.values())
    for key_head in (0, heads[0] // 2 - 1, heads[0] - 1):
        part, part_losses = group(x, losses, key_head)
        alone = gradients_of(part, part_losses)
        assert_same_gradients(group_gradients(grads, key_head, 2), alone, f"key head {key_head} alone")


@pytest.mark.slow
def test_tokens_past_two_to_the_31_elements(seed):
    """270,001 tokens of 16/64 heads of 128: 2.2e9 elements in each of v, o, do and dv."""
    if DEVICE == "cpu" or free_gigabytes() < 70:
        pytest.skip("needs 70 GB of free GPU memory")
    tokens, cut, heads = 270_001, 269_000, (16, 64)
    rng = device_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=rng, device=DEVICE, dtype=torch.bfloat16)

    q, k, v = normal(heads[0], 128), normal(heads[0], 128), normal(heads[1], 128)
    for t in (q, k):
        t.div_(t.norm(dim=-1, keepdim=True))
    g, beta = F.logsigmoid(normal(heads[1]).float()), normal(heads[1]).float().sigmoid()
    x = Inputs(q, k, v, g, beta, cu=cu_of([cut, tokens - cut]))
    losses = Losses(normal(heads[1], 128), None)
    grads = gradients_of(x, losses)
    # Fast gates forget within some hundred tokens, forwards and backwards: the middle of a window is exact.
    # Row 262144 begins at element 2^31.
    for key_head in (0, 15):
        part, part_losses = group(x, losses, key_head)
        found = group_gradients(grads, key_head, 4)
        windows = ((262144 - 1024, 262144 + 1024, 400, -400), (cut - 1024, cut, 400, None), (cut, tokens, 0, None))
        for begin, end, first, last in windows:
            window = Inputs(*(t[:, begin:end] for t in part.tensors))
            expected = exact_gradients(window, Losses(part_losses.do[:, begin:end], None))
            for name, exact in expected.items():
                error = relative(found[name][:, begin:end][:, first:last], exact[:, first:last])
                assert error <= FLOORS[torch.bfloat16][name], f"d{name} of rows {begin} to {end}: {error:.2e}"
