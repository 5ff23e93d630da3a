"""qla's kernels in a linear-attention layer of transformers, against the layer's own PyTorch function in float32."""

from __future__ import annotations

import inspect

import pytest
import torch
from problems import DEVICE, gpu_marks, relative

pytest.importorskip("transformers")
from qla.integrations import transformers as plugin  # noqa: E402

pytestmark = gpu_marks()


def test_layer_in_bfloat16(monkeypatch):
    """Outputs and the gradients of the input and of all parameters: about the error of the own function in bfloat16."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    # Where fla is installed the layer would call that.
    for name in plugin.ENTRY_POINTS:
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    torch.manual_seed(0)
    layer = module.Qwen3NextGatedDeltaNet(Qwen3NextConfig(num_hidden_layers=1), 0).to(DEVICE)
    x = torch.randn(1, 700, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(dtype):
        layer.to(dtype)
        leaf = x.to(dtype).requires_grad_()
        out = layer(leaf)
        out = out[0] if isinstance(out, tuple) else out
        return out, *torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])

    exact = run(torch.float32)
    own = run(torch.bfloat16)
    plugin.enable()
    try:
        through = run(torch.bfloat16)
    finally:
        plugin.disable()
    for name, ours, theirs, wanted in zip(["o", "x", *dict(layer.named_parameters())], through, own, exact, strict=True):
        assert relative(ours, wanted) <= 1.5 * relative(theirs, wanted) + 5e-3, name


def test_decoding_in_bfloat16(monkeypatch):
    """A prompt and tokens after it, one at a time, through the layer's cache."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen3_next import modeling_qwen3_next as module
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    for name in plugin.ENTRY_POINTS:
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    torch.manual_seed(0)
    config = Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    layer = module.Qwen3NextGatedDeltaNet(config, 0).to(DEVICE)
    x = torch.randn(3, 204, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(dtype):
        layer.to(dtype)
        cache = DynamicCache(config=config)
        with torch.no_grad():
            return torch.cat([layer(part, cache) for part in (x[:, :200].to(dtype), *x[:, 200:].to(dtype).split(1, dim=1))], dim=1)

    exact = run(torch.float32)
    own = run(torch.bfloat16)
    plugin.enable()
    try:
        through = run(torch.bfloat16)
    finally:
        plugin.disable()
    assert relative(through[:, :200], exact[:, :200]) <= 1.5 * relative(own[:, :200], exact[:, :200]) + 5e-3
    assert relative(through[:, 200:], exact[:, 200:]) <= 1.5 * relative(own[:, 200:], exact[:, 200:]) + 5e-3
