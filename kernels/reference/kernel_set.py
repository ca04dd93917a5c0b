"""The PyTorch backend: this module is a `KernelSet` and a `SamplingKernels`, see `kernels/kernel_set.py`."""

from __future__ import annotations

from typing import Final

from .attention import copy_blocks, paged_attention, paged_decode, plan_attention
from .attention_prologue import attention_prologue
from .layers import activated, add_rms_norm, gated, layer_norm, rms_norm
from .sampling import choose, count_tokens, edit, force, score, thresholds

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

name: Final = "torch"
