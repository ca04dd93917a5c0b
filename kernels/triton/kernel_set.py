"""The Triton backend: this module is a `KernelSet` and a `SamplingKernels`, see `kernels/kernel_set.py`."""

from __future__ import annotations

from typing import Final

from .attention import paged_attention, paged_decode, prologue_decode
from .attention_plan import plan_attention
from .attention_prologue import attention_prologue
from .block_copy import copy_blocks
from .layers import activated, add_rms_norm, gated, layer_norm, rms_norm
from .logit_edits import count_tokens, edit, force
from .products import activated_linear, gated_linear, linear_add, norm_linear
from .sampling import choose, choose_truncated
from .token_scores import score

__all__ = [
    "activated",
    "activated_linear",
    "add_rms_norm",
    "attention_prologue",
    "choose",
    "choose_truncated",
    "copy_blocks",
    "count_tokens",
    "edit",
    "force",
    "gated",
    "gated_linear",
    "layer_norm",
    "linear_add",
    "name",
    "norm_linear",
    "paged_attention",
    "paged_decode",
    "plan_attention",
    "prologue_decode",
    "rms_norm",
    "score",
]

name: Final = "triton"
