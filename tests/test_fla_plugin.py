"""fla's own chunk_gated_delta_rule with qla enabled: it reaches qla and gives its bits, and disable() gives fla back."""

from __future__ import annotations

import os

import pytest
import torch
from gradients import assert_same_gradients, gradients_of, make_losses
from problems import DEVICE, Inputs, assert_same_bits, gpu_marks, make_inputs, relative

import qla
from qla import api
from qla.integrations import fla as plugin

# fla would hand the calls that qla leaves over to flash-qla where that is installed.
os.environ["FLA_FLASH_QLA"] = "0"

pytestmark = gpu_marks(seconds=400)


@pytest.fixture(scope="module")
def operation():
    if DEVICE == "cpu":
        pytest.skip("fla's kernels need a GPU")
    return pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)


@pytest.fixture
def calls(monkeypatch):
    """What reaches qla, with qla enabled; the calls run as usual."""
    seen = []
    run = api.chunk_gated_delta_rule

    def spy(**arguments):
        seen.append(arguments)
        return run(**arguments)

    monkeypatch.delenv("FLA_QLA", raising=False)
    monkeypatch.setattr(api, "chunk_gated_delta_rule", spy)
    plugin.enable()
    yield seen
    plugin.disable()


def through(function, x: Inputs, **options: object):
    """A call as fla's users make it."""
    return function(*x.tensors, initial_state=x.h0, output_final_state=True, cu_seqlens=None if x.cu is None else x.cu.long(), **options)


@pytest.mark.parametrize("lengths", [300, [1000, 64, 129]], ids=["equal", "packed"])
def test_calls_reach_qla(operation, calls, rng, lengths):
    x = make_inputs(rng, lengths, (2, 4))
    assert_same_bits(through(operation.chunk_gated_delta_rule, x), x.run(), "fla's function and qla's")
    (got,) = calls
    assert all(got[name] is t for name, t in zip(("q", "k", "v", "g", "beta"), x.tensors, strict=True)) and got["initial_state"] is x.h0


def test_gradients_are_qlas(operation, calls, rng):
    x = make_inputs(rng, 300, (2, 4))
    given = make_losses(rng, x)
    through_fla = gradients_of(x, given, lambda y: through(operation.chunk_gated_delta_rule, y))
    assert len(calls) == 1
    assert_same_gradients(through_fla, gradients_of(x, given), "through fla's function and qla's")


def test_options_of_flas_layer(operation, calls, rng):
    """The keywords with which fla's layer GatedDeltaNet calls."""
    x = make_inputs(rng, 300, (2, 4))
    A_log, dt_bias = (torch.randn(4, generator=rng, device=rng.device).to(DEVICE) for _ in range(2))
    options = {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "state_v_first": True,
        "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias,
    }  # fmt: skip
    x = x.with_(h0=x.h0.transpose(-1, -2).contiguous())
    through_fla = through(operation.chunk_gated_delta_rule, x, **options)
    assert len(calls) == 1 and calls[0].keys() >= options.keys()
    assert_same_bits(through_fla, through(qla.chunk_gated_delta_rule, x, **options), "fla's function and qla's")


def test_what_qla_leaves_and_disable(operation, calls, monkeypatch, rng):
    """fla's kernels answer, as close to qla's results as 16 bits allow."""
    x = make_inputs(rng, 300, (2, 4))
    expected = x.run()
    unknown = through(operation.chunk_gated_delta_rule, x, something_new=1)
    monkeypatch.setenv("FLA_QLA", "0")
    switched_off = through(operation.chunk_gated_delta_rule, x)
    monkeypatch.delenv("FLA_QLA")
    plugin.disable()
    disabled = through(operation.chunk_gated_delta_rule, x)
    assert not calls
    for results in (unknown, switched_off, disabled):
        for got, ours in zip(results, expected, strict=True):
            assert relative(got, ours) < 1e-2
    plugin.enable()
    assert_same_bits(through(operation.chunk_gated_delta_rule, x), expected, "enabled again")
    assert len(calls) == 1
