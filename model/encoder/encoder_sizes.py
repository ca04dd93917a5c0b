"""Sizes of an encoder's config.json, compared with the tensors of its files before transformers builds the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.safetensors import Checkpoint
from ..config_keys import ConfigKeys

LAYER = re.compile(r"(?:.*?\.)?(?:layers?|blocks?)\.(\d{1,9})\.")
WIDTHS = ("hidden_size", "dim", "embedding_size", "intermediate_size", "hidden_dim", "vocab_size", "type_vocab_size")
OTHER_WIDTHS = re.compile(r"(?:\w+_)?(?:size|dim)|d_\w+")  # keys of numbers, some of which no tensor here has
MAX_OTHER_WIDTH = 1 << 16
DEPTHS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_hidden_groups", "inner_group_num")
MAX_SHARED_LAYERS = 1024  # of a model whose layers share their tensors
MAX_POSITIONS = 1 << 20  # of a model without a table of them


def check_encoder_sizes(root: Path, values: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a size beyond the largest of any tensor, and for more layers than the files hold."""
    widest = max((max(checkpoint.shape(name), default=1) for name in checkpoint.names), default=1)
    found = [int(match[1]) for match in map(LAYER.match, checkpoint.names) if match]
    deepest = max(found) + 1 if found else MAX_SHARED_LAYERS
    has_positions = any("position_embeddings.weight" in name for name in checkpoint.names)
    limits = {**dict.fromkeys(WIDTHS, widest), **dict.fromkeys(DEPTHS, deepest)}
    limits["max_position_embeddings"] = widest if has_positions else MAX_POSITIONS
    for part, place in ((values, ""), (values.get("text_config"), ": text_config")):
        if isinstance(part, dict):
            others = [key for key in part if OTHER_WIDTHS.fullmatch(key) and type(part[key]) is int]
            loose = dict.fromkeys(others, max(widest, MAX_OTHER_WIDTH))
            _check(ConfigKeys(part, f"config.json ({root}){place}"), loose | limits)


def _check(keys: ConfigKeys, limits: Mapping[str, int]) -> None:
    for key, most in limits.items():
        value = keys.values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            keys.fail(
                key, f"must be a whole number up to {most}, as the tensors of the files have it, not {value!r:.100}"
            )
