"""Models that are not in a folder of this machine, and the values of `load_format`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from millrace.model.checkpoint.load_formats import ELSEWHERE, LOAD_FORMATS
from millrace.model.demo import WEIGHTS
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.evaluation.window_scorer import WindowScorer
from millrace.stages.evaluation.windows import TextWindow
from millrace.stages.loading.model import load_model
from tests.model.checkpoint.range_server import RangeServer

PROMPT = TextWindow(np.arange(40, 60, dtype=np.int32), 19)


@pytest.mark.parametrize("attention_backend", ["native", "torch"])
def test_a_streamed_model_has_the_logits_of_its_folder(attention_backend: str, tmp_path: Path) -> None:
    def logits(model: str, **settings: str) -> np.ndarray:
        config = EngineConfig(
            model=model,
            device="cpu",
            threads=1,
            attention_backend=attention_backend,
            download_dir=str(tmp_path),
            **settings,
        )
        return np.concatenate([part.copy() for _, part in WindowScorer.load(config, LiveEnv(0)).logits(PROMPT, 64)])

    with RangeServer(WEIGHTS) as server:
        streamed = logits(server.url, load_format="stream")
        sent = server.num_bytes["model.safetensors"]
    np.testing.assert_array_equal(streamed, logits(str(WEIGHTS)))
    assert not list(tmp_path.rglob("*.safetensors"))
    assert sent < 1.1 * (WEIGHTS / "model.safetensors").stat().st_size


def test_progress_counts_the_bytes_of_a_download(tmp_path: Path) -> None:
    phases = Phases(lambda: 0.0)
    seen: list[tuple[int, int]] = []
    phases.progress.set = lambda _, done, total: seen.append((done, total))  # type: ignore[method-assign]
    with RangeServer(WEIGHTS) as server:
        config = EngineConfig(model=server.url, device="cpu", threads=1, download_dir=str(tmp_path), max_num_seqs=4)
        info = load_model(config, phases, LiveEnv(0)).info
    assert info.model_id == "m"
    assert seen[-1][0] == seen[-1][1] > (WEIGHTS / "model.safetensors").stat().st_size


@pytest.mark.parametrize("load_format", [*LOAD_FORMATS, "package.module:Source", "a:B"])
def test_a_format_of_this_engine_is_taken(load_format: str) -> None:
    assert EngineConfig(load_format=load_format).load_format == load_format


@pytest.mark.parametrize("load_format", ELSEWHERE)
def test_a_format_of_another_engine_is_answered_with_what_to_use(load_format: str) -> None:
    with pytest.raises(ConfigError, match=rf"^load_format = {load_format}: is another engine's; use (auto|st|sa)"):
        EngineConfig(load_format=load_format)


@pytest.mark.parametrize("load_format", ["", "pickle", "a.b", "a:", ":B", "a b:C"])
def test_an_unknown_format_is_refused_with_those_that_are(load_format: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, safetensors, gguf, stream, dummy, or package.module:Source"):
        EngineConfig(load_format=load_format)


@pytest.mark.parametrize("model", ["/no/such.gguf", "./no-such", "~no/such", "no-such.gguf", "/no/such:Q4_K_M"])
def test_a_path_that_leads_nowhere_is_refused_before_anything_is_taken(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"model = {re.escape(model)}: there is no such file or folder"):
        EngineConfig(model=model).check_files()


def test_hub_ids_addresses_and_files_of_a_folder_are_no_missing_paths(tmp_path: Path) -> None:
    for model in (
        None,
        "demo",
        "owner/name",
        "owner/name.gguf",
        "https://host/m.gguf",
        str(tmp_path),
        f"{tmp_path}:Q4",
    ):
        EngineConfig(model=model).check_files()
