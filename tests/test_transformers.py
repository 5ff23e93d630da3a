"""qla's kernels in a linear-attention layer of transformers, against the layer's own PyTorch function in float32."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, gpu_marks, relative

pytest.importorskip("transformers")
from qla.integrations import transformers as plugin  # noqa: E402

pytestmark = gpu_marks()


def test_layer_in_bfloat16():
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(num_hidden_layers=1), 0).to(DEVICE)
    x = torch.randn(1, 700, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(dtype):
        plugin.disable()
        exact = layer.float()(x)
        layer.to(dtype)
        own = layer(x.to(dtype))
        plugin.enable()
        try:
            return layer(x.to(dtype)), own, exact
        finally:
            plugin.disable()

    through, own, exact = ((y[0] if isinstance(y, tuple) else y) for y in run(torch.bfloat16))
    assert relative(through, exact) <= 1.5 * relative(own, exact) + 5e-3
