"""Rotary keys in every form rotate each layer as transformers does, or are refused in one line.

A few draws for some types; with MILLRACE_FULL=1 hundreds for all.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from millrace.model.errors import CheckpointError
from millrace.model.families.registry import parse_config
from tests.counts import FULL
from tests.model.families.rope_forms import BY_TYPE, SIZES, TYPES, draw, ours, theirs

CHOSEN = TYPES if FULL else [*BY_TYPE, "gpt_neox", "llama", "phi3"]


@pytest.mark.parametrize("model_type", CHOSEN)
def test_drawn_rotary_keys_rotate_as_in_transformers_or_are_refused(model_type: str) -> None:
    num_equal = 0
    for number in range(400 if FULL else 40):
        keys = draw(model_type, random.Random(f"{model_type} {number}"))
        try:
            found = ours(model_type, keys)
        except CheckpointError as error:
            assert str(error).startswith("config.json: ") and "\n" not in str(error)
            continue
        try:
            expected = theirs(model_type, keys)
        except Exception:  # a form that transformers does not load, in one of many ways
            continue
        for mine, other in zip(found, expected, strict=True):
            assert mine is None or mine.is_like(other), f"draw {number}: {keys}"
        num_equal += 1
    assert num_equal > 5


def longrope(length: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmo3", {"rope_theta": 2e4}, "rope_theta: transformers 4 gives 20000 to all layers"),
    ("olmo3", {"rope_parameters": {"rope_theta": 2e4}}, "rope_parameters: must hold an object for each type of layer"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: must hold an object for each type"),
    (
        "gemma3_text",
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling: must name its kind as rope_type",
    ),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "has 'full_attention', but all layers of a llama model"),
    ("gpt_neox", {"head_dim": 32}, "head_dim: 32 is not supported"),
    (
        "olmo3",
        {"rope_parameters": {"full_attention": longrope(64), "sliding_attention": longrope(128)}},
        "rope_parameters: longrope of two original lengths, 64 and 128, is not supported",
    ),
]


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED)
def test_a_form_that_transformers_reads_in_part_is_refused(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config({**SIZES, "model_type": model_type, **keys}, "config.json")
    assert message in str(caught.value)
