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
from tests.stages.pressure import begin_together, swap_if_there_is_room

MODEL = MODELS["gemma3-270m"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MODEL.missing), reason=f"not installed: {', '.join(MODEL.missing)}"),
    pytest.mark.skipif(not machine.instruction_sets() or build.find_compiler() is None, reason="no native step"),
    pytest.mark.skipif(not FULL, reason="takes minutes; MILLRACE_FULL=1 runs it"),
]


def answers(
    folder: Path, prompts: list[list[int]], num_tokens: int, **settings: Any
) -> tuple[list[list[int]], int, int]:
    """Greedy answers of `num_tokens`, how often a sequence was preempted, and how often it was swapped for that."""
    with LLM(str(folder), device="cpu", attention_backend="native", enable_prefix_caching=False, **settings) as llm:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        allocator: Any = llm.engine.pipeline.stages["allocate"].allocator
        swap_out, swapped = allocator.host.swap_out, []
        allocator.host.swap_out = lambda *args: swapped.append(swap_out(*args)) or swapped[-1]
        swap_if_there_is_room(llm.engine)
        begin_together(llm.engine, len(prompts))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        schedule: Any = llm.engine.pipeline.stages["schedule"]
        found = [list(output.outputs[0].token_ids) for output in outputs]
        return found, schedule.scheduler.num_preemptions, sum(places is not None for places in swapped)


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
    ("length", "prompts", "num_tokens", "whole", "part", "is_short"),
    [(16384, [15_000], 30, 1024, 205, False), (4096, [200, 230, 260, 290], 400, 512, 100, True)],
    ids=["long", "swapped"],
)
def test_answers_are_those_of_five_times_the_memory(
    length: int,
    prompts: list[int],
    num_tokens: int,
    whole: int,
    part: int,
    is_short: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long one alone; and four that grow until some are preempted, and swapped out and in again."""
    asked = [drawn(count, seed) for seed, count in enumerate(prompts)]
    settings: dict[str, Any] = {"max_model_len": length, "swap_space": 0.3}
    found, num_preempted, num_swapped = answers(MODEL.gguf(), asked, num_tokens, num_gpu_blocks=part, **settings)
    assert (num_preempted > 0, num_swapped > 0) == (is_short, is_short)
    monkeypatch.setattr(NativeDecoder, "runs_kinds", False)
    expected, num_preempted, _ = answers(MODEL.gguf(), asked, num_tokens, num_gpu_blocks=whole, **settings)
    assert not num_preempted and found == expected
