"""How the forward runs on a GPU: CUDA graphs, no waiting on the host, streams, devices, nothing remembered about a tensor."""

from __future__ import annotations

import pytest
import torch
from problems import (
    DEVICE,
    Inputs,
    assert_accurate,
    assert_same_bits,
    copy_into,
    cu_of,
    gpu_marks,
    make_inputs,
    sync_is_an_error,  # noqa: F401
)

import qla

pytestmark = gpu_marks()

NEEDS_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@NEEDS_CUDA
@pytest.mark.parametrize("grad_enabled", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_graph_replay_with_other_values_and_lengths(padded, offsets, grad_enabled, rng):
    """A captured call reads lengths and values anew: other lengths, empty sequences and padding rows included."""
    tokens = [[130, 65, 5], [1, 199, 0], [64, 64, 64] if padded else [64, 64, 72], [0, 0, 150] if padded else [0, 0, 200]]
    cases = []
    for lengths in tokens:
        case = make_inputs(rng, 200, state=False)
        h0 = torch.randn(3, 4, 128, 128, generator=rng).to(DEVICE)
        cases.append(case.with_(h0=h0, cu=cu_of(lengths, offsets)))
    expected = [case.run() for case in cases]
    static = Inputs(*(t.clone() for t in cases[0].tensors), cases[0].h0.clone(), cases[0].cu.clone())
    with torch.set_grad_enabled(grad_enabled):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            static.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, state = static.run()
    for number in (0, 1, 2, 3, 1, 0):
        copy_into(static, cases[number])
        o.fill_(float("nan"))
        state.fill_(float("nan"))
        graph.replay()
        assert_same_bits((o, state), expected[number], f"replay with lengths {tokens[number]}")


@NEEDS_CUDA
def test_graph_of_equal_lengths(rng):
    cases = [make_inputs(rng, 100, batch=3) for _ in range(2)]
    expected = [case.run() for case in cases]
    static = Inputs(*(t.clone() for t in cases[0].tensors), cases[0].h0.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = static.run()
    for number in (1, 0):
        for a, b in zip((*static.tensors, static.h0), (*cases[number].tensors, cases[number].h0), strict=True):
            a.copy_(b)
        graph.replay()
        assert_same_bits((o, state), expected[number], "replay")


@NEEDS_CUDA
@pytest.mark.parametrize("dims", [(128, 128), (64, 96)], ids=str)
@pytest.mark.parametrize("tokens", [[70, 0, 65], 100], ids=str)
def test_no_wait_on_the_host(tokens, dims, sync_is_an_error, rng):  # noqa: F811
    x = make_inputs(rng, tokens, dims=dims)
    wide = x.cu is not None and x.with_(cu=x.cu.long())
    x.run()
    torch.cuda.synchronize()
    with sync_is_an_error():
        got = x.run()
        x.run(state_v_first=True, initial_state=x.h0.transpose(-1, -2), scale=-0.3)
        x.run(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        qla.chunk_gated_delta_rule_fwd(*x.tensors, None, x.h0, True, x.cu)
        if wide:
            wide.run()
            x.run(cu_seqlens_cpu=None)
    assert_accurate(x, got)


@NEEDS_CUDA
def test_the_host_runs_ahead(rng):
    """A call returns while the GPU is still busy with earlier work, also without PyTorch's own detection of waits."""
    x = make_inputs(rng, [70, 65])
    x.run()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    busy.record()
    x.run()
    assert not busy.query(), "the call waited for work queued before it"
    torch.cuda.synchronize()


def test_changed_in_place_gives_the_new_answer(rng):
    x = make_inputs(rng, [70, 65])
    first = x.run()
    expected = Inputs(*x.tensors, x.h0, cu_of([100, 35])).run()
    x.cu.copy_(cu_of([100, 35]))
    assert_same_bits(x.run(), expected, "offsets changed in place")
    x.cu.copy_(cu_of([70, 65]))
    assert_same_bits(x.run(), first, "and back")
    other = make_inputs(rng, [70, 65])
    expected = other.run()
    for a, b in zip((*x.tensors, x.h0), (*other.tensors, other.h0), strict=True):
        a.copy_(b)
    assert_same_bits(x.run(), expected, "values changed in place")


@NEEDS_CUDA
def test_runs_on_the_current_stream(rng):
    """On a side stream, behind work that makes the inputs late: on any other stream the kernels would read NaN."""
    x = make_inputs(rng, [130, 65])
    expected = x.run()
    late = Inputs(*(torch.full_like(t, float("nan")) for t in x.tensors), torch.full_like(x.h0, float("nan")), torch.zeros_like(x.cu))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        copy_into(late, x)
        got = late.run()
    side.synchronize()
    assert_same_bits(got, expected, "on a side stream")


@NEEDS_CUDA
@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current(rng):
    x = make_inputs(rng, [130, 65])
    expected = x.run()
    there = Inputs(*(t.to("cuda:1") for t in x.tensors), x.h0.to("cuda:1"), x.cu.to("cuda:1"))
    with torch.cuda.device(0):
        o, state = there.run()
        assert torch.cuda.current_device() == 0
    assert o.device == state.device == torch.device("cuda:1")
    assert_same_bits((o.to(DEVICE), state.to(DEVICE)), expected, "cuda:1")
    assert_same_bits(x.run(), expected, "cuda:0 afterwards")


@pytest.mark.parametrize("state", [True, False], ids=["h0", "no h0"])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_tokens(batch, state, rng):
    x = make_inputs(rng, 0, batch=batch, state=state)
    o, final = x.run()
    assert o.shape == (batch, 0, 4, 128)
    assert torch.equal(final, x.h0) if state else bool((final == 0).all())
    assert final.shape == (batch, 4, 128, 128)
    packed = x.with_(cu=cu_of([0] * batch)) if batch == 1 else None
    if packed:
        assert_same_bits(packed.run(), (o, final), "packed without tokens")


@NEEDS_CUDA
def test_memory_is_given_back(rng):
    """Outputs and what the kernels hand each other, nothing that outlives the call."""
    x = make_inputs(rng, [2000, 2096], (4, 16))
    x.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        x.run()
    assert torch.cuda.memory_allocated() == before
