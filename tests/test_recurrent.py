"""fused_recurrent_gated_delta_rule on a GPU against float64: dtypes, layouts, lengths, batches, head sizes, activations, and how it runs.

The kernel computes in fp32, so the result in fp32 is held to fp32, and o to little more than one rounding to its dtype.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DEVICE,
    NAN_FILLED,
    VIEWS,
    Inputs,
    assert_same_bits,
    copy_into,
    cu_of,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    side_load,
    sync_is_an_error,  # noqa: F401
    views_of,
    worst_state,
)

import qla
from qla.reference import recurrent_gated_delta_rule

pytestmark = gpu_marks(NAN_FILLED)

NEEDS_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32 = 5e-6  # sums of 128 products, a token after the other


def run(x: Inputs, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"g": x.g, "beta": x.beta, "initial_state": x.h0, "output_final_state": True, "cu_seqlens": x.cu} | options
    o, state = qla.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, **options)
    assert o.dtype == x.q.dtype and o.shape == x.v.shape and o.is_contiguous()
    assert state is None or (state.dtype == torch.float32 and state.is_contiguous())
    return o, state


def turned(state: torch.Tensor) -> torch.Tensor:
    return state.transpose(-1, -2).contiguous()


def check(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], limit: float = FP32) -> None:
    """o to 1.05 roundings to its dtype and the state to fp32, the state also one by one."""
    (o, state), (exact_o, exact_state) = got, expected
    rounding = relative(exact_o.to(o.dtype), exact_o) if o.dtype != torch.float32 else 0.0
    assert relative(o, exact_o) <= 1.05 * rounding + limit
    assert relative(state, exact_state) <= limit
    assert worst_state(state, exact_state) <= 4 * limit


@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_lengths(dtype, tokens, rng):
    x = make_inputs(rng, tokens, (2, 8), batch=3, dtype=dtype)
    expected = x.exact()
    check(run(x), expected)
    o, state = run(x, initial_state=turned(x.h0), state_v_first=True)
    assert_same_bits((o, turned(state)), run(x), "V first")
    without = x.with_(h0=None)
    check(run(without), without.exact())
    assert run(x, output_final_state=False)[1] is None


def test_hundreds_of_tokens(rng):
    x = make_inputs(rng, 300, (1, 2), gates="mixed")
    check(run(x), x.exact(), limit=2e-5)


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 8), (16, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 4, 37, 256])
def test_batches_and_head_counts(batch, heads, rng):
    if batch * heads[1] > 4096:
        pytest.skip("the float64 reference would take long")
    x = make_inputs(rng, 1, heads, batch=batch)
    check(run(x), x.exact())


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("dims", [(60, 64), (64, 60), (64, 64), (100, 128), (128, 100), (4, 8), (7, 33), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(dtype, dims, v_first, rng):
    x = make_inputs(rng, 3, (2, 4), batch=5, dims=dims, dtype=dtype)
    given = turned(x.h0) if v_first else x.h0
    o, state = run(x, initial_state=given, state_v_first=v_first)
    assert state.shape == given.shape
    check((o, turned(state) if v_first else state), x.exact())


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [[1] * 9, [0, 3, 0, 0, 17, 1, 64, 0], [0, 0], [5]], ids=str)
def test_packed(lengths, offsets, rng):
    """Also with rows that no sequence owns, which hold NaN: they give zeros."""
    x = make_inputs(rng, lengths, (2, 8))
    x = x.with_(cu=x.cu.to(offsets))
    expected = x.exact()
    got = run(x)
    check(got, expected) if sum(lengths) else assert_same_bits((got[1],), (x.h0,), "nothing to do", ("state",))
    longer = Inputs(*(torch.cat([t, torch.full_like(t[:, :1], torch.nan).repeat(1, 70, *[1] * (t.dim() - 2))], 1) for t in x.tensors),
                    x.h0, x.cu)  # fmt: skip
    o, state = run(longer)
    assert bool((o[:, sum(lengths) :] == 0).all())
    assert_same_bits((o[:, : sum(lengths)], state), got, "with rows to spare")
    assert_same_bits(run(x, cu_seqlens=x.cu.cpu(), cu_seqlens_cpu=x.cu.cpu()), got, "offsets on the CPU")


@NEEDS_CUDA
@pytest.mark.parametrize(
    "wrong", [[0, 50, 20, 128], [0, 300], [-64, 128], [100, 0, 100], [2**31 - 1, -(2**31)], [2**40, -(2**40)]], ids=str
)
def test_wrong_offsets_end(wrong, rng):
    """What they give is nobody's; the next call is right."""
    x = make_inputs(rng, 128, (2, 4), state=False)
    run(x, cu_seqlens=torch.tensor(wrong, dtype=torch.int64, device=DEVICE))
    torch.cuda.synchronize()
    check(run(x), x.exact(), limit=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("small", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_activations(small, allow_neg_eigval, dtype, rng):
    """All of them in the kernel, from raw values of any dtype; a row of zeros stays zero."""
    x = make_inputs(rng, 4, (2, 8), batch=3, dtype=dtype)
    x = x.with_(q=3 * x.q, k=0.3 * x.k, g=30 * torch.randn(x.g.shape, generator=rng).to(DEVICE, small), beta=x.g.to(small))
    x.q[0, 0, 0] = 0
    x.k[1, 0, 0] = 0
    A_log, dt_bias = (torch.randn(8, generator=rng).to(DEVICE, small) for _ in range(2))
    for bias in (dt_bias, None):
        got = run(
            x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip
        q, k = (t.double() / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x.q, x.k))
        g = -A_log.double().exp() * F.softplus(x.g.double() + (0 if bias is None else bias.double()))
        beta = x.beta.double().sigmoid() * (2 if allow_neg_eigval else 1)
        check(got, Inputs(q, k, x.v.double(), g, beta, x.h0).exact())
        assert bool((got[0][0, 0, :4] == 0).all())


@pytest.mark.parametrize("small", [torch.bfloat16, torch.float32], ids=str)
def test_further_gates_and_beta_of_columns(small, rng):
    x = make_inputs(rng, 5, (2, 4), batch=2, dims=(64, 96))
    gk, gv = (F.logsigmoid(torch.randn(2, 5, 4, n, generator=rng)).to(DEVICE, small) for n in (64, 96))
    beta = torch.rand(x.v.shape, generator=rng).to(DEVICE, small)
    wide = [t.double() for t in (*x.tensors[:4], beta)]
    for with_k, with_v in ((gk, gv), (gk, None), (None, gv)):
        got = run(x, gk=with_k, gv=with_v, beta=beta)
        further = [t if t is None else t.double() for t in (with_k, with_v)]
        check(got, recurrent_gated_delta_rule(*wide, None, x.h0.double(), True, False, None, *further))
        o, state = run(x, gk=with_k, gv=with_v, beta=beta, initial_state=turned(x.h0), state_v_first=True)
        assert_same_bits((o, turned(state)), got, "V first")


def test_defaults(rng):
    x = make_inputs(rng, 3, (2, 4))
    ones, zeros = torch.ones_like(x.beta), torch.zeros_like(x.g)
    check(run(x, g=None, beta=None, scale=-0.3), x.with_(g=zeros, beta=ones).exact(-0.3))
    assert_same_bits(run(x, g=None, beta=None), run(x, g=zeros, beta=ones), "absent and neutral")


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e30])
def test_large_and_small_states(size, rng):
    x = make_inputs(rng, 5, (2, 4), dtype=torch.float32, gates="none")
    x = x.with_(h0=size * x.h0)
    (o, state), (exact_o, exact_state) = run(x), x.exact()
    assert relative(state, exact_state) < FP32 and relative(o, exact_o) < 2e-5


def test_a_state_with_nothing_to_do_is_not_rounded(rng):
    x = make_inputs(rng, 5, (2, 4))
    assert torch.equal(run(x.with_(g=torch.zeros_like(x.g), beta=torch.zeros_like(x.beta)))[1], x.h0)


def test_gates_of_minus_infinity(rng):
    x = make_inputs(rng, 4, (2, 4))
    g = x.g.clone()
    g[:, 2, ::2] = -torch.inf
    check(run(x.with_(g=g)), x.with_(g=g).exact())


@pytest.mark.parametrize("small", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_of_gates_beta_and_state(small, rng):
    x = make_inputs(rng, 4, (2, 4), batch=2)
    x = x.with_(g=x.g.to(small), beta=x.beta.to(small), h0=x.h0.to(small))
    wide = x.with_(g=x.g.float(), beta=x.beta.float(), h0=x.h0.float())
    assert_same_bits(run(x), run(wide), f"{small} and the same values in fp32")


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", VIEWS)
def test_views_give_the_same_bits(kind, tokens, rng):
    x = make_inputs(rng, tokens, (2, 4), batch=6)
    if kind == "slice of tokens" and tokens < 3:
        pytest.skip("takes three tokens from the front")
    assert_same_bits(run(views_of(x, kind)), run(x), kind)
    joined = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], -1).split([256, 256, 512], -1)
    q, k, v = (t.unflatten(-1, (-1, 128)) for t in joined)
    assert_same_bits(run(x.with_(q=q, k=k, v=v)), run(x), "slices of one projection")


def test_token_by_token_is_all_at_once(rng):
    """The state is carried in fp32, so a step a call gives the bits of one call."""
    x = make_inputs(rng, 9, (2, 4), batch=2)
    whole = run(x)
    outputs, state = [], x.h0
    for t in range(9):
        o, state = run(x.rows(t, t + 1).with_(h0=state))
        outputs.append(o)
    assert_same_bits((torch.cat(outputs, 1), state), whole, "a step a call")


def test_agrees_with_the_chunked_kernels(rng):
    x = make_inputs(rng, 64, (2, 4), batch=2)
    for a, b in zip(run(x), x.run(), strict=True):
        assert relative(a, b) < 1e-2


def test_same_bits_every_time(rng):
    x = make_inputs(rng, [1, 5, 0, 17, 1, 1, 30], (4, 16))
    expected = run(x)
    load = side_load() if DEVICE != "cpu" else lambda number: None
    for number in range(50):
        load(number)
        assert_same_bits(run(x), expected, f"repetition {number}")


@NEEDS_CUDA
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_graph_replay_with_other_contents(packed, rng):
    lengths = [[1, 2, 0, 4], [0, 0, 7, 1], [2, 2, 2, 2]] if packed else [1] * 3
    cases = [make_inputs(rng, n, (2, 8), batch=1 if packed else 5) for n in lengths]
    if packed:  # one of them with rows to spare
        cases = [make_inputs(rng, [8], (2, 8)).with_(h0=case.h0, cu=case.cu) for case in cases]
    expected = [run(case) for case in cases]
    static = Inputs(*(t.clone() for t in cases[0].tensors), cases[0].h0.clone(), None if cases[0].cu is None else cases[0].cu.clone())
    run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(static)
    for number in (1, 0, 2, 1):
        copy_into(static, cases[number])
        o.fill_(float("nan"))
        state.fill_(float("nan"))
        graph.replay()
        assert_same_bits((o, state), expected[number], f"replay {number}")


@NEEDS_CUDA
def test_no_wait_on_the_host_and_no_other_kernel(sync_is_an_error, rng):  # noqa: F811
    x = make_inputs(rng, [1, 1, 3], (2, 8))
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    run(x, **options)
    torch.cuda.synchronize()
    with sync_is_an_error():
        run(x, **options)
        run(x, cu_seqlens=x.cu.long(), initial_state=turned(x.h0), state_v_first=True)


@NEEDS_CUDA
def test_one_launch(rng, monkeypatch):
    """Nothing but the kernel runs for a step in a model's dtypes, raw gates and slices of one projection included."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.undo()  # no filling of buffers
    x = make_inputs(rng, 1, (2, 8), batch=4)
    joined = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], -1).split([256, 256, 1024], -1)
    q, k, v = (t.unflatten(-1, (-1, 128)) for t in joined)
    x = x.with_(q=q, k=k, v=v, beta=x.beta.bfloat16(), g=x.g.bfloat16())
    options = {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True,
        "A_log": torch.zeros(8, device=DEVICE), "dt_bias": torch.zeros(8, device=DEVICE, dtype=torch.bfloat16),
    }  # fmt: skip
    run(x, **options)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run(x, **options)
        torch.cuda.synchronize()
    kernels = [event.name for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1 and "recurrent" in kernels[0], kernels


@NEEDS_CUDA
def test_runs_on_the_current_stream(rng):
    x = make_inputs(rng, [3, 5])
    expected = run(x)
    late = Inputs(*(torch.full_like(t, float("nan")) for t in x.tensors), torch.full_like(x.h0, float("nan")), torch.zeros_like(x.cu))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        copy_into(late, x)
        got = run(late)
    side.synchronize()
    assert_same_bits(got, expected, "on a side stream")


@NEEDS_CUDA
@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current(rng):
    x = make_inputs(rng, [3, 5])
    expected = run(x)
    there = Inputs(*(t.to("cuda:1") for t in x.tensors), x.h0.to("cuda:1"), x.cu.to("cuda:1"))
    with torch.cuda.device(0):
        o, state = run(there)
    assert o.device == state.device == torch.device("cuda:1")
    assert_same_bits((o.to(DEVICE), state.to(DEVICE)), expected, "cuda:1")


@NEEDS_CUDA
def test_gradients_are_refused_when_taken(rng):
    x = make_inputs(rng, 2)
    x.v.requires_grad_()
    o, state = run(x)
    for result in (o, state):
        with pytest.raises(NotImplementedError, match="use chunk_gated_delta_rule"):
            result.sum().backward(retain_graph=True)


@NEEDS_CUDA
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(backend, rng, monkeypatch):
    monkeypatch.undo()  # no filling of buffers while torch.compile traces
    torch._dynamo.reset()
    x = make_inputs(rng, [1, 1, 4], (2, 8))

    def call(q, k, v, g, beta, h0, cu):
        return qla.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=h0, output_final_state=True, cu_seqlens=cu, use_qk_l2norm_in_kernel=True
        )

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    arguments = (*x.tensors, x.h0, x.cu)
    assert_same_bits(compiled(*arguments), call(*arguments), backend)


@NEEDS_CUDA
def test_no_warning_where_the_kernel_runs(rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in DTYPES:
            run(make_inputs(rng, 2, dtype=dtype))


@pytest.mark.parametrize("state", [True, False], ids=["h0", "no h0"])
def test_no_tokens(state, rng):
    x = make_inputs(rng, 0, batch=3, state=state)
    o, final = run(x)
    assert o.shape == (3, 0, 4, 128)
    assert torch.equal(final, x.h0) if state else bool((final == 0).all())
    none = make_inputs(rng, 5, state=False).with_(cu=cu_of([]))
    o, final = run(none)
    assert bool((o == 0).all()) and final.shape == (0, 4, 128, 128)


def test_inputs_are_left_alone_and_outputs_are_new(rng):
    x = make_inputs(rng, [3, 5])
    copies = [t.clone() for t in (*x.tensors, x.h0, x.cu)]
    _, state = run(x)
    for t, copy in zip((*x.tensors, x.h0, x.cu), copies, strict=True):
        assert torch.equal(t, copy)
    assert state.data_ptr() != x.h0.data_ptr()
