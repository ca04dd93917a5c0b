"""What an engine computes with, as a digest: an answer that one has begun goes on only in one with the same."""

from __future__ import annotations

import hashlib
from typing import Any

from .protocol import EngineReady

FACTS = ("dtype", "quantization", "kv_cache_dtype", "model_impl", "vocab_size")  # of its `ModelInfo`
SETTINGS = ("merge_adapter",)


def digest_of(ready: EngineReady) -> str:
    """Of the files of its model, and of what else changes its answers by more than rounding does."""
    facts: list[Any] = [getattr(ready.info, name) for name in FACTS]
    facts += [None if ready.config is None else getattr(ready.config, name) for name in SETTINGS]
    text = repr((sorted(ready.files.items()), facts))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
