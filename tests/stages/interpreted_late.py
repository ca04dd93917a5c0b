"""Whole engines with Triton's kernels, in its interpreter: an asynchronous device, and deterministic answers.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest` of this file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.triton import launch as triton_launch
from millrace.stages.params import SamplingParams, ThinkingBudget
from tests.counts import count
from tests.model.checkpoints import make_checkpoint
from tests.runtime.device_streams.host_streams import HostStreams
from tests.stages.late_engines import Ask, Ran, both, greedy, prompts, run

SETTINGS: dict[str, Any] = {
    "attention_backend": "triton",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 32,
    "num_gpu_blocks": 10,
    "num_cpu_blocks": 0,  # else rates are measured at the start, which takes long here
    "enforce_eager": True,
}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path, num_hidden_layers=count(1, 2))
    return path


def drawn(seed: int, num_tokens: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True, **more)


def test_what_is_chosen_on_the_device_is_what_is_chosen_for_a_host_that_waits(checkpoint: Path) -> None:
    thinking = ThinkingBudget(num_tokens=1, start_ids=(300,), end_ids=(301, 302), is_open=True)
    params = [
        drawn(1, allowed_token_ids=tuple(range(100, 300)), bad_words_token_ids=((150,), (151, 152))),
        drawn(2, top_k=20, top_p=0.8, min_p=0.05),
        drawn(3, repetition_penalty=1.5, logit_bias={7: 3.0}, min_tokens=2),
        greedy(3, logprobs=3, thinking_budget=thinking),
    ]
    asks = list(zip(prompts(4, 10), params, strict=True))
    right, ran = both(checkpoint, asks, HostStreams(), **SETTINGS)
    assert ran.answers == right.answers and ran.num_attended == 0
    assert ran.answers[3][0][0][1:] == [301, 302] and all(100 <= token < 300 for token in ran.answers[0][0][0])
    ours, theirs = (each.outputs[3].outputs[0].logprobs for each in (ran, right))
    assert ours == theirs and ours is not None and len(ours) == 3


def test_a_request_alone_and_among_others_has_log_probabilities_of_equal_bits(checkpoint: Path) -> None:
    scored = greedy(3, logprobs=5)
    asks: list[Ask] = [(list(range(3, 20)), scored), *((prompt, greedy(4)) for prompt in prompts(2, 12, seed=2))]

    def answer(some: list[Ask]) -> Ran:
        return asyncio.run(run(checkpoint, some, HostStreams(), deterministic=True, **SETTINGS))

    alone, among, behind = answer(asks[:1]), answer(asks), answer(asks[::-1])
    logprobs = [each.outputs[0].logprobs for each in (alone.outputs[0], among.outputs[0], behind.outputs[-1])]
    assert logprobs[0] is not None and len(logprobs[0]) == 3
    assert logprobs[0] == logprobs[1] == logprobs[2]
