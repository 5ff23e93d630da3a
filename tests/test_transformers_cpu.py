"""qla in a linear-attention layer of transformers: same outputs and gradients as the layer's own function, through PyTorch on the CPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from numeric import assert_close

pytest.importorskip("transformers")
from qla import api  # noqa: E402
from qla.integrations import transformers as plugin  # noqa: E402

SIZES = {
    "hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def disabled():
    plugin.disable()
    yield
    plugin.disable()


@pytest.fixture
def calls(monkeypatch):
    """What qla's function is called with."""
    seen = []
    original = api.chunk_gated_delta_rule

    def spy(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(api, "chunk_gated_delta_rule", spy)
    return seen


def make_config(model):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    return (Qwen3NextConfig if model == "qwen3_next" else Qwen3_5TextConfig)(**SIZES)


def make_layer(model):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    return (Qwen3NextGatedDeltaNet if model == "qwen3_next" else Qwen3_5GatedDeltaNet)(make_config(model), 0)


def run(model):
    """Output of a fresh layer for the same weights and input, gradients of its input and of its parameters."""
    layer = make_layer(model)
    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return out, *torch.autograd.grad(out.square().sum(), [x, *parameters])


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_layer_computes_the_same(model, calls):
    own = run(model)
    assert calls == []
    plugin.enable()
    plugin.enable()
    through = run(model)
    assert len(calls) == 1
    for got, expected in zip(through, own, strict=True):
        assert_close(got, expected, 1e-4)
    plugin.disable()
    run(model)
    assert len(calls) == 1, "disabled"


def test_all_models_are_reached():
    modules = [import_module(f"transformers.models.{model}.modeling_{model}") for model in plugin.MODELS]
    own = [(module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule) for module in modules]
    plugin.enable()
    assert all(module.torch_chunk_gated_delta_rule is api.chunk_gated_delta_rule for module in modules)
    assert all(module.torch_recurrent_gated_delta_rule is api.fused_recurrent_gated_delta_rule for module in modules)
    plugin.disable()
    assert [(module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule) for module in modules] == own


def decode(model, tokens=3):
    """Outputs of a prompt and of some tokens after it, one at a time through the layer's cache."""
    from transformers.cache_utils import DynamicCache

    layer = make_layer(model)
    x = torch.randn(2, 70 + tokens, 64, generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=make_config(model))
    with torch.no_grad():
        return [layer(part, cache) for part in (x[:, :70], *x[:, 70:].split(1, dim=1))]


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_decoding_computes_the_same(model, calls, monkeypatch):
    steps = []
    original = api.fused_recurrent_gated_delta_rule
    monkeypatch.setattr(api, "fused_recurrent_gated_delta_rule", lambda *args, **kwargs: steps.append(kwargs) or original(*args, **kwargs))
    own = decode(model)
    plugin.enable()
    through = decode(model)
    assert len(calls) == 1 and len(steps) == 3 and all(step["initial_state"] is not None for step in steps)
    for got, expected in zip(through, own, strict=True):
        assert_close(got, expected, 1e-4)


def test_unknown_models(monkeypatch):
    monkeypatch.setattr(plugin, "MODELS", ("no_such_model",))
    with pytest.raises(RuntimeError, match="no model that qla knows: no_such_model"):
        plugin.enable()
