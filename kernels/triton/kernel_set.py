"""The Triton backend: this module is a `KernelSet` and a `SamplingKernels`, see `kernels/kernel_set.py`."""

from __future__ import annotations

from typing import Final

from .attention import paged_attention, paged_decode
from .attention_plan import plan_attention
from .attention_prologue import attention_prologue
from .block_copy import copy_blocks
from .layers import activated, add_rms_norm, gated, layer_norm, rms_norm
from .logit_edits import count_tokens, edit, force
from .sampling import choose, score
from .thresholds import thresholds

__all__ = [
    "activated",
    "add_rms_norm",
    "attention_prologue",
    "choose",
    "copy_blocks",
    "count_tokens",
    "edit",
    "force",
    "gated",
    "layer_norm",
    "name",
    "paged_attention",
    "paged_decode",
    "plan_attention",
    "rms_norm",
    "score",
    "thresholds",
]

name: Final = "triton"
