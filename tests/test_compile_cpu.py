"""torch.compile takes the public function whole, through the operators of qla.ops; with the stand-ins for the kernels.

What is compiled gives the bits of what is not, forward and backward, activations aside; other lengths and batches do not compile again.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from inputs import LENGTHS_WITH_GAPS, cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, assert_close
from test_kernel_path_cpu import SPEC, kernels  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

import qla
from qla import autocp, ops
from qla.autocp import Plan
from qla.checks import unsupported_reason

CUT = Plan(1, 2, 0, 1, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(function, inputs, start, **options):
    """Results and gradients of a call and of its leaves."""
    leaves = [*inputs.leaves(), start.detach().clone().requires_grad_()]
    o, state = function(*leaves[:5], initial_state=leaves[5], output_final_state=True, **options)
    return (o, state, *torch.autograd.grad(o.float().square().sum() + state.square().sum(), leaves))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": -0.5, "state_v_first": True}, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}, {"auto_cp": CUT}],
    ids=["plain", "scale and layout", "activations", "cut"],
)
def test_compiled_is_eager(rng, packed, options):
    tokens = 240
    inputs = make_inputs(rng, tokens, batch=1 if packed else 2, key_dim=64, value_dim=100, dtype=torch.bfloat16)
    start = make_state(rng, inputs, len(LENGTHS_WITH_GAPS) if packed else None).float()
    if options.get("state_v_first"):
        start = start.transpose(2, 3).contiguous()
    options = options | ({"cu_seqlens": cu_seqlens_of(LENGTHS_WITH_GAPS)} if packed else {})
    if packed:  # on the CPU its values are checked, which reads them: as on a GPU, nobody does here
        options["cu_seqlens"] = options["cu_seqlens"].int()
    expected = run(qla.chunk_gated_delta_rule, inputs, start, **options)
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(run(compiled, inputs, start, **options), expected, strict=True):
        if "use_qk_l2norm_in_kernel" in options:  # kernels, and what the compiler makes of PyTorch's operations: rounded elsewhere
            assert_close(got, wanted, 2e-2)
        else:
            assert_bitwise_equal(got, wanted)


def test_other_lengths_do_not_compile_again(rng):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for batch, tokens in ((3, 70), (7, 129), (5, 64), (6, 200)):  # no size twice: torch.compile would take equal ones for the same
        inputs = make_inputs(rng, tokens, batch=batch, key_dim=128, value_dim=128, dtype=torch.bfloat16)
        o, _ = compiled(*inputs)
        assert_bitwise_equal(o, qla.chunk_gated_delta_rule(*inputs)[0])
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_plan_is_made_for_each_call(rng, monkeypatch):
    asked = []
    monkeypatch.setattr(autocp, "plan", lambda sizes, spec: asked.append((sizes.num_seqs, sizes.tokens)) or autocp.WHOLE)
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, tokens in ((2, 70), (3, 129)):
        compiled(*make_inputs(rng, tokens, batch=batch, dtype=torch.bfloat16))
    assert asked == [(2, 140), (3, 387)]


def test_nothing_is_launched_without_tokens(rng, kernels):  # noqa: F811
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(rng, 0, dtype=torch.bfloat16)
    start = make_state(rng, inputs).float()
    o, state = compiled(*inputs, initial_state=start, output_final_state=True)
    assert o.shape == inputs.v.shape and kernels.launches == []
    assert_bitwise_equal(state, start)


@pytest.mark.parametrize(
    "plan",
    [[], [1, 2, 0, 1, 8, 0, 2**31 - 1, 0], [1, 2, 0, 1, 8, 1, 2**31 - 1, 0], [1, 1, 1, 1, 0, 0, 0, 2]],
    ids=["own", "cut", "whole backward", "way back"],
)
@pytest.mark.parametrize("with_state", [False, True])
def test_operators_keep_their_contract(rng, plan, with_state):
    """torch.library.opcheck: schema, fake results, autograd registration, tracing with dynamic shapes."""
    inputs = make_inputs(rng, 140, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    q, k, v = (x[0].contiguous().requires_grad_() for x in inputs[:3])
    g, beta = (x[0].float().contiguous().requires_grad_() for x in inputs[3:])
    start = make_state(rng, inputs).float().contiguous().requires_grad_() if with_state else None
    sizes = (1, 140, 0.25, False, plan, 10.0)
    torch.library.opcheck(ops.chunk_forward, (q, k, v, g, beta, start, None, *sizes, with_state))


def test_whether_kernels_take_it_is_decided_while_tracing(monkeypatch):
    """Tensors of a CUDA device that is not there."""
    monkeypatch.setattr("qla.device._spec_of_index", lambda index: SPEC)

    @torch.compile(fullgraph=True, backend="eager")
    def function(x):
        return x + 1 if unsupported_reason(x, x, x) is None else x.nothing

    with FakeTensorMode():
        assert function(torch.empty(1, 70, 2, 128, dtype=torch.bfloat16, device="cuda:0")).shape == (1, 70, 2, 128)
