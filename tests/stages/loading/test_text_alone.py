"""The text parts of a model whose weights are elsewhere."""

from __future__ import annotations

import fnmatch
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.model.checkpoint.hub import bundled_model_path, resolve_text
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.loading.model import load_text

huggingface_hub = pytest.importorskip("huggingface_hub")
WEIGHTS = "model.safetensors"


class Hub:
    """Has the bundled model, and keeps what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: set[str] = set()

    def snapshot_download(self, name: str, *, allow_patterns: list[str], **options: Any) -> str:
        for path in bundled_model_path().iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                self.fetched.add(path.name)
                shutil.copy(path, self.folder)
        return str(self.folder)


def test_a_hub_model_gives_its_text_without_a_download_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    config = EngineConfig(model="someone/some-model")
    text = load_text(config, Phases(lambda: 0.0), with_weights=False)
    assert hub.fetched and WEIGHTS not in hub.fetched and not (tmp_path / WEIGHTS).exists()
    here = load_text(replace(config, model=None), Phases(lambda: 0.0))
    info: Any = None
    words = "Zoe and Tom, ü"
    assert text(info).tokenizer.encode(words) == here(info).tokenizer.encode(words)


@pytest.mark.parametrize(
    "model", [None, "demo", "https://example.com/model", "owner/name:Q4_K_M", "hf://a/b@main/c.gguf"]
)
def test_models_that_are_no_folder_of_the_hub_are_found_as_ever(model: str | None) -> None:
    assert resolve_text(model, offline=True) is None
