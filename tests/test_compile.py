"""torch.compile on the GPU: the compiled function, whole, gives the bits of the eager one; CUDA graphs of forward and backward."""

from __future__ import annotations

import pytest
import torch
from gradients import assert_same_gradients, gradients_of, make_losses
from problems import DEVICE, Inputs, assert_same_bits, gpu_marks, make_inputs

import qla
from qla.autocp import Plan

pytestmark = gpu_marks(pytest.mark.skipif(DEVICE == "cpu", reason="needs the kernels: test_compile_cpu.py has stand-ins"))

CUT = Plan(4, 1, 1, 2, 4)


def through(function, **options):
    """A call as ``Inputs.run`` makes it."""

    def call(x: Inputs):
        return function(*x.tensors, initial_state=x.h0, output_final_state=True, cu_seqlens=x.cu, **options)

    return call


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lengths", [[700, 64, 1], [1600]], ids=str)
@pytest.mark.parametrize("options", [{"auto_cp": False}, {"auto_cp": CUT}, {}], ids=["uncut", "cut", "own plan"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 128)], ids=str)
def test_compiled_is_eager(dims, options, lengths, backend, rng):
    torch._dynamo.reset()
    x = make_inputs(rng, lengths if len(lengths) > 1 else lengths[0], (2, 8), dims=dims, gates="mixed")
    losses = make_losses(rng, x)
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, backend=backend)
    eager = through(qla.chunk_gated_delta_rule, **options)
    assert_same_bits(through(compiled, **options)(x), eager(x), "forward")
    assert_same_gradients(gradients_of(x, losses, through(compiled, **options)), gradients_of(x, losses, eager), "backward")


def test_other_lengths_do_not_compile_again(rng):
    torch._dynamo.reset()
    compiled = torch.compile(qla.chunk_gated_delta_rule, fullgraph=True, dynamic=True)
    x = make_inputs(rng, [700, 64, 1], (2, 8))
    through(compiled)(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([100, 50, 7, 2300], [65, 3], [9, 9, 9, 9, 900]):
            x = make_inputs(rng, lengths, (2, 8))
            assert_same_bits(through(compiled)(x), through(qla.chunk_gated_delta_rule)(x), str(lengths))
