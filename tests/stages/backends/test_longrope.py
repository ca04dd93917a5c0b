"""LongRoPE through whole engines: each sequence has the rotary factors for its length, as in transformers.

Prompts end before, at and behind the length where factors change; so the answers of most go across it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages import LLM, Engine, SamplingParams
from tests.families.oracle import Answer
from tests.families.ways import TOLERANCE, differing
from tests.families.zoo import Entry, chosen
from tests.stages.late_engines import Ran, greedy, late, run

SHORT = 64  # tokens of the longest sequence with short factors, of all rows
NUM_NEW = 6
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    (row,) = chosen(["phi3-longrope-edge"])
    return Entry(row, tmp_path_factory.mktemp("zoo") / row.name, NUM_NEW, (63, 64, 65))


@pytest.fixture(scope="module")
def answers(entry: Entry) -> list[Answer]:
    return list(entry.answers)


def check(answers: list[Answer], outputs: Any) -> None:
    for answer, output in zip(answers, outputs, strict=True):
        assert differing(answer, output.outputs[0]) == "", f"prompt of {len(answer.prompt)}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_answers_across_the_length_where_factors_change_are_those_of_transformers(
    entry: Entry, answers: list[Answer], backend: Any
) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0)
    sizes = {"max_model_len": 80, "num_gpu_blocks": 60, "num_cpu_blocks": 60, "max_num_batched_tokens": 24}
    with LLM(str(entry.folder), attention_backend=backend, **SMALL, **sizes) as llm:
        assert llm.engine.info.short_length == SHORT
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate([answer.prompt for answer in answers], params, use_tqdm=False)
            check(answers, outputs)
        assert outputs[0].num_cached_tokens == 60 and outputs[2].num_cached_tokens == 64
        assert outputs[0].metrics is not None and outputs[0].metrics["preemptions"] == 1
        assert dict(llm.engine.status().core.scheduler.preemptions) == {("recompute", "rope"): 4}


def test_an_answer_streamed_across_the_change_loses_and_repeats_nothing(entry: Entry, answers: list[Answer]) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=2)

    async def stream() -> None:
        settings = {"attention_backend": "native", "max_model_len": 80, "num_gpu_blocks": 60, **SMALL}
        async with Engine(model=str(entry.folder), **settings) as engine:
            for answer in answers:
                ids, logprobs = [], []
                async for part in engine.generate(answer.prompt, params, output_kind="delta"):
                    ids += part.outputs[0].token_ids
                    logprobs += part.outputs[0].logprobs or []
                assert ids == answer.token_ids == [one.token_id for one in logprobs]
                right = answer.logits.log_softmax(-1)[range(NUM_NEW), ids].tolist()
                assert [one.logprob for one in logprobs] == pytest.approx(right, abs=TOLERANCE)
            assert engine.status().core.scheduler.preemptions["recompute", "rope"] == 2

    with captured_logs():
        asyncio.run(stream())


@pytest.mark.slow
def test_steps_in_flight_on_a_late_device_change_factors_where_transformers_does(
    entry: Entry, answers: list[Answer]
) -> None:
    asks = [(answer.prompt, greedy(NUM_NEW, logprobs=0)) for answer in answers]
    settings = {"steps_in_flight": 4, "max_model_len": 96, "block_size": 4}
    with captured_logs():
        ran: Ran = asyncio.run(run(entry.folder, asks, late(), **settings))
    check(answers, ran.outputs)
    assert ran.num_attended == 0 and ran.num_preemptions == 2


def test_up_to_that_length_there_is_nothing_to_change(entry: Entry, answers: list[Answer]) -> None:
    with LLM(str(entry.folder), attention_backend="native", max_model_len=SHORT, num_gpu_blocks=40, **SMALL) as llm:
        assert llm.engine.info.short_length == 0
