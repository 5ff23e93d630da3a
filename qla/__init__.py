"""Gated Delta Rule attention for NVIDIA Hopper, through hand-scheduled TileLang kernels.

``chunk_gated_delta_rule`` and, for decoding, ``fused_recurrent_gated_delta_rule`` take the place of fla's functions of these
names. Importing this package needs no GPU, touches none, and does not load TileLang.
"""

from qla.api import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from qla.autocp import explain_plan
from qla.checks import unsupported_reason
from qla.startup import warmup

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "explain_plan",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "unsupported_reason",
    "warmup",
]
