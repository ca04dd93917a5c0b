"""Models of which every layer has a window: they free memory where nothing needs whole beginnings of sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.native import build, machine
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.native_decoder import NativeDecoder
from millrace.runtime.env.log import captured_logs
from millrace.stages import LLM, SamplingParams
from tests.model.checkpoints import make_checkpoint

LENGTH = 200  # of the longest sequence; windows of the model are 32
BACKENDS = ["torch"] + ["native"] * bool(machine.instruction_sets() and build.find_compiler())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    make_checkpoint("mistral", path)
    return path


def run(path: Path, backend: str, **settings: Any) -> tuple[list[list[int]], str]:
    """Greedy answers to prompts of odd lengths, and the row of the cache."""
    sizes = {
        "device": "cpu",
        "max_model_len": LENGTH,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "swap_space": 0.1,
    }
    with LLM(str(path), attention_backend=backend, **sizes | settings) as llm:
        prompts = [[1 + (7 * i + seed) % 90 for i in range(count)] for seed, count in enumerate((33, 140, 5))]
        params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stages: Any = llm.engine.pipeline.stages
        stages["allocate"].allocator.check()
        assert llm.engine.info.memory is not None
        about = llm.engine.info.memory.row("kv_cache").what
        return [list(output.outputs[0].token_ids) for output in outputs], about


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_in_all_layers_free_memory_and_answers_are_the_same(
    mistral: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured_logs() as logs:  # 9 blocks of 16 tokens: less than the longest of these sequences
        found, about = run(mistral, backend, num_gpu_blocks=9, enable_prefix_caching=False)
    assert "3 of 3 layers keep the last 32" in about and "tokens that fit if all layers kept all" in about
    assert any("the windows of all layers free memory" in str(line) for line in logs)
    for decoder in (Decoder, NativeDecoder):
        monkeypatch.setattr(decoder, "runs_kinds", False)
    expected, about = run(mistral, backend, num_gpu_blocks=100, enable_prefix_caching=False)
    assert found == expected
    assert "3 of 3 layers see the last 32 tokens, and keep the others, too, as the layers of" in about


def test_with_a_prefix_cache_windows_in_all_layers_mask_and_the_report_says_so(mistral: Path) -> None:
    _, about = run(mistral, BACKENDS[-1], num_gpu_blocks=100)
    assert "3 of 3 layers see the last 32 tokens, and keep the others, too, as the prefix cache finds" in about
    assert "enable_prefix_caching = false frees them" in about
