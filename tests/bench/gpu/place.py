"""Where a part of the benchmark runs, and where its results go.

A dry run shows that the code runs: on a CPU, with tiny shapes, Triton's kernels in their interpreter and streams that
are simulated. What it times says nothing of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DRY = "cpu, interpreter: no figure is a GPU's"

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and what is wanted of a part there."""

    device: torch.device
    seed: int  # of fresh inputs
    tell: Callable[[dict[str, Any]], None]  # a row of figures
    complain: Callable[[str], None]  # something is wrong, in a sentence
    is_tiny: bool = False  # the smallest inputs only, as another program looks at each access

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches; the interpreter cannot compute in bfloat16."""
        return torch.float32 if self.is_dry else torch.bfloat16

    @property
    def name(self) -> str:
        return DRY if self.is_dry else torch.cuda.get_device_name(self.device)
