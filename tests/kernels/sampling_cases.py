"""Rows of logits and sampling parameters of slots, to test sampling kernels on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.layout import sampling_rows


def table(*asked: dict[str, Any]) -> Tensor:
    """The sampling parameters of one slot for each argument, [S, 16] i32."""
    return torch.from_numpy(np.stack([sampling_rows.pack(**one) for one in asked]))


def noise(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Logits [L, V] f32."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def spoil(logits: Tensor) -> Tensor:
    """The logits with broken rows 1 to 4: NaN, +inf, only -inf, and one number among -inf. The first two are at the
    end of their row."""
    logits = logits.clone()
    logits[1, -1], logits[2, -1] = float("nan"), float("inf")
    logits[3:5] = float("-inf")
    logits[4, logits.shape[1] // 2] = -7.0
    return logits
