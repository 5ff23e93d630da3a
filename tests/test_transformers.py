"""qla's kernels in a linear-attention layer of transformers, against the layer's own PyTorch function in float32."""

from __future__ import annotations

import inspect

import pytest
import torch
from problems import DEVICE, gpu_marks, relative

pytest.importorskip("transformers")
from qla.integrations import transformers as plugin  # noqa: E402

pytestmark = gpu_marks()


@pytest.fixture
def layer_of(monkeypatch):
    """A linear-attention layer of Qwen3-Next on the device, from its options; where fla is installed it would call that."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    for name in plugin.ENTRY_POINTS:
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))

    def make(**options):
        torch.manual_seed(0)
        config = Qwen3NextConfig(num_hidden_layers=1, **options)
        return module.Qwen3NextGatedDeltaNet(config, 0).to(DEVICE), config

    return make


def run_three_times(run):
    """Results of run(dtype): in float32 and in bfloat16 by the layer's own function, and in bfloat16 through qla."""
    exact, own = run(torch.float32), run(torch.bfloat16)
    plugin.enable()
    try:
        return exact, own, run(torch.bfloat16)
    finally:
        plugin.disable()


def check(through, own, exact, name):
    assert relative(through, exact) <= 1.5 * relative(own, exact) + 5e-3, name


def test_layer_in_bfloat16(layer_of):
    """Outputs and the gradients of the input and of all parameters: about the error of the own function in bfloat16."""
    layer, _ = layer_of()
    x = torch.randn(1, 700, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(dtype):
        layer.to(dtype)
        leaf = x.to(dtype).requires_grad_()
        out = layer(leaf)
        out = out[0] if isinstance(out, tuple) else out
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])

    exact, own, through = run_three_times(run)
    for name, *three in zip(["o", "x", *dict(layer.named_parameters())], through, own, exact, strict=True):
        check(*three, name)


def test_decoding_in_bfloat16(layer_of):
    """A prompt and tokens after it, one at a time, through the layer's cache."""
    from transformers.cache_utils import DynamicCache

    layer, config = layer_of(layer_types=["linear_attention"])
    x = torch.randn(3, 204, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(dtype):
        layer.to(dtype)
        cache = DynamicCache(config=config)
        with torch.no_grad():
            return torch.cat([layer(part, cache) for part in (x[:, :200].to(dtype), *x[:, 200:].to(dtype).split(1, dim=1))], dim=1)

    exact, own, through = run_three_times(run)
    check(through[:, :200], own[:, :200], exact[:, :200], "prompt")
    check(through[:, 200:], own[:, 200:], exact[:, 200:], "tokens")
