"""qla in the linear-attention layers of Hugging Face transformers 5: Qwen3-Next, Qwen3.5 and others that compute the Gated Delta Rule.

After ``qla.integrations.transformers.enable()`` these layers call ``qla.chunk_gated_delta_rule``, and for single tokens of decoding
``qla.fused_recurrent_gated_delta_rule``, where they would call fla's functions or their own in PyTorch.
"""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType
from typing import Any

from qla import api

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "lara_mini", "olmo_hybrid")
# What the layers of each modeling file look up at every call, and what of qla.api stands in for it.
ENTRY_POINTS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}

_lock = threading.RLock()
_replaced: list[tuple[ModuleType, str, Any]] = []


def enable() -> None:
    """Makes the layers of all models in MODELS that the installed transformers has call qla's two functions.

    Models that exist already do so too. May be called again and from several threads.

    Raises ImportError without transformers, and RuntimeError if it has none of the models or they call another function.
    """
    with _lock:
        if _replaced:
            return
        import_module("transformers")
        for model in MODELS:
            try:
                module = import_module(f"transformers.models.{model}.modeling_{model}")
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("transformers.models."):
                    raise
                continue
            for name, ours in ENTRY_POINTS.items():
                if hasattr(module, name):
                    _replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, getattr(api, ours))
        if not _replaced:
            raise RuntimeError(f"the installed transformers has no model that qla knows: {', '.join(MODELS)}")


def disable() -> None:
    """Gives the layers back what ``enable`` took. Does nothing if qla is not enabled."""
    with _lock:
        while _replaced:
            module, name, function = _replaced.pop()
            setattr(module, name, function)
