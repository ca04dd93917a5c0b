"""A real model whose windows free memory: its start report, and answers from a part of the blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.native import build, machine
from millrace.model.decoder.native_decoder import NativeDecoder
from millrace.stages import LLM, SamplingParams
from tests.counts import FULL
from tests.real_models.models import MODELS

MODEL = MODELS["gemma3-270m"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MODEL.missing), reason=f"not installed: {', '.join(MODEL.missing)}"),
    pytest.mark.skipif(not machine.instruction_sets() or build.find_compiler() is None, reason="no native step"),
    pytest.mark.skipif(not FULL, reason="takes minutes; MILLRACE_FULL=1 runs it"),
]


def answers(folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], int]:
    """Greedy answers of 30 tokens, and how often a sequence was preempted."""
    with LLM(str(folder), device="cpu", attention_backend="native", enable_prefix_caching=False, **settings) as llm:
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        schedule: Any = llm.engine.pipeline.stages["schedule"]
        return [list(output.outputs[0].token_ids) for output in outputs], schedule.scheduler.num_preemptions


def drawn(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [2, *(draw.randrange(1000, 200_000) for _ in range(length - 1))]


def test_gemma_holds_five_times_the_tokens_at_32k() -> None:
    with LLM(str(MODEL.gguf()), device="cpu", max_model_len=32768, kv_cache_bytes=600_000_000) as llm:
        memory = llm.engine.info.memory
        assert memory is not None
        uniform = memory.row("kv_cache").num_bytes // memory.bytes_per_block * memory.block_size
        assert memory.num_tokens >= 5 * uniform and memory.num_longest == 5
        assert "3 of 18 layers keep all tokens, 15 the last 512: 5.6 times" in memory.row("kv_cache").what


@pytest.mark.parametrize(
    ("length", "prompts", "whole", "part", "is_short"),
    [(16384, [15_000], 1024, 205, False), (4096, [3000, 2800], 512, 100, True)],
)
def test_answers_are_those_of_five_times_the_memory(
    length: int, prompts: list[int], whole: int, part: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one alone, and two of which one is swapped."""
    asked = [drawn(count, seed) for seed, count in enumerate(prompts)]
    found, num_preempted = answers(MODEL.gguf(), asked, max_model_len=length, num_gpu_blocks=part, swap_space=0.3)
    assert (num_preempted > 0) == is_short
    monkeypatch.setattr(NativeDecoder, "runs_kinds", False)
    expected, _ = answers(MODEL.gguf(), asked, max_model_len=length, num_gpu_blocks=whole)
    assert found == expected
