"""The estimate of memory counts all tables that have a row a position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.rope import tables_bytes
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import parse_config
from tests.model.checkpoints import SHAPE

WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CASES: list[tuple[str, dict[str, Any], int]] = [  # bytes a position
    ("llama", {}, 4 * 16),
    ("gemma3_text", {**WINDOWS, "head_dim": 16, "rope_parameters": None}, 2 * 4 * 16),
    ("ministral3", {"head_dim": 16, "rope_parameters": None}, 4 * (16 + 1)),
    ("falcon", {"alibi": True, "num_attention_heads": 4}, 4 * 4),
    ("bloom", {"n_layer": 2, "n_head": 4}, 0),
]


@pytest.mark.parametrize(("model_type", "keys", "bytes_each"), CASES)
def test_the_tables_take_the_memory_that_is_estimated(model_type: str, keys: dict[str, Any], bytes_each: int) -> None:
    sizes = {**SHAPE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    spec = parse_config({**sizes, **keys, "model_type": model_type}, "")
    weights = load_weights(Path("none"), spec, torch.device("cpu"), torch.float32, "dummy")
    decoder = Decoder(spec, weights, kernel_set.load("torch"), 48)
    tables = [t for one in spec.attentions for t in (*decoder.tables_of(one), *decoder.tables_by_position(one))]
    by_position = {t.data_ptr(): t.nbytes for t in tables if t is not None and 48 in t.shape}
    assert tables_bytes(spec, 48) == sum(by_position.values()) == 48 * bytes_each
