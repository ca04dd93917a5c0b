"""Models of which every layer has a window: they free memory, with a prefix cache and swapped sequences too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.native import build, machine
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.native_decoder import NativeDecoder
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


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}], ids=["cache", "no cache"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_in_all_layers_free_memory_and_answers_are_the_same(
    mistral: Path, backend: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, about = run(mistral, backend, num_gpu_blocks=9, **settings)  # less than the longest of these sequences
    assert "3 of 3 layers keep the last 32" in about and "tokens that fit if all layers kept all" in about
    for decoder in (Decoder, NativeDecoder):
        monkeypatch.setattr(decoder, "runs_kinds", False)
    expected, about = run(mistral, backend, num_gpu_blocks=100, enable_prefix_caching=False)
    assert found == expected
    assert "3 of 3 layers see the last 32 tokens, and keep the others, too, as the layers of" in about


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_is_found_again_by_windows_that_have_passed_its_beginning(mistral: Path, backend: str) -> None:
    sizes = {"device": "cpu", "max_model_len": LENGTH, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, n=2)
    prompt = [1 + 7 * i % 90 for i in range(140)]
    with LLM(str(mistral), attention_backend=backend, num_gpu_blocks=24, **sizes) as llm:
        first, again = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    answers = [list(choice.token_ids) for output in (first, again) for choice in output.outputs]
    assert again.num_cached_tokens >= 128 and answers[1:] == answers[:-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_starts_with_fewer_blocks_than_its_trial_prompt_has(mistral: Path, backend: str) -> None:
    found, _ = run(mistral, backend, num_gpu_blocks=3)  # of 16 tokens; the trial has 64
    assert [len(tokens) for tokens in found] == [14, 14, 14]
