"""The rows themselves: names, keys, and that each type of ours has several."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.counts import FULL
from tests.families.checkpoint import make_config, make_model, rewritten
from tests.families.row import Row
from tests.families.rows import ROWS
from tests.families.zoo import quiet

REWRITTEN = [row for row in ROWS if row.file]


def test_each_row_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


@pytest.mark.slow
def test_each_row_has_keys_that_its_type_knows() -> None:
    assert [row.name for row in ROWS if make_config(row).model_type != row.model_type] == []


RANDOM = ("qwen3.5", "nemotron-h", "gpt-oss")  # with vectors that transformers draws itself


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.by] if FULL else RANDOM)
def test_a_row_has_the_same_weights_in_each_run(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    with quiet():
        torch.manual_seed(1)
        first = make_model(row).state_dict()
        torch.manual_seed(2)
        again = make_model(row).state_dict()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, again[name])] == []


@pytest.mark.parametrize("row", REWRITTEN, ids=lambda row: row.name)
def test_a_rewritten_file_means_the_same_to_transformers(row: Row) -> None:
    made = keys_of(make_config(row))
    read = keys_of(CONFIG_MAPPING[row.model_type].from_dict(rewritten(row, made)))
    differing = {key for key in made if made[key] != read.get(key)}
    assert differing <= {"_sliding_window_pattern", "rope_scaling"}, {
        key: (made[key], read.get(key)) for key in differing
    }


def keys_of(config: PreTrainedConfig) -> dict[str, Any]:
    keys: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    (keys.get("rope_parameters") or {}).pop("type", None)  # the older name of rope_type
    return keys
