"""Checkpoints whose files are links out of their folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError
from millrace.stages import LLM


def test_links_out_of_the_folder_are_followed_only_if_the_setting_says_so(tmp_path: Path) -> None:
    root, store = tmp_path / "model", tmp_path / "store"
    shutil.copytree(WEIGHTS, root)
    store.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (root / name).rename(store / name)
        (root / name).symlink_to(store / name)
    settings = {"model": str(root), "device": "cpu", "num_gpu_blocks": 8, "max_model_len": 64}
    with pytest.raises(CheckpointError, match=r"config\.json .*allow_links_outside"):
        LLM(**settings)
    with LLM(**settings, allow_links_outside=True) as llm:
        assert llm.info.eos_token_ids
