"""Guided steps: rows with grammars, budgets, allowed tokens and bad words are sampled on the device, in graphs.

The answers are those of a synchronous device, which chooses them with torch on the host.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.stages import StructuredOutputs
from millrace.stages.backends.cuda.guide_uploads import GuideLayout
from millrace.stages.backends.cuda.guide_writer import GuideWriter
from millrace.stages.backends.cuda.step_submission import StepSubmitter
from millrace.stages.engine.engine import Engine
from millrace.stages.params import SamplingParams, ThinkingBudget
from millrace.stages.sample.token_constraints import TokenConstraints
from tests.counts import FULL
from tests.model.checkpoints import make_checkpoint
from tests.stages.grants import started
from tests.stages.late_engines import Ask, Ran, both, greedy, late, prompts, run

DATE = "[0-9]{4}(-[0-9]{2})?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


def regex(pattern: str, num_tokens: int = 30, **more: Any) -> SamplingParams:
    structured = StructuredOutputs(regex=pattern)
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, structured_outputs=structured, **more)


def budget(num_tokens: int, **more: Any) -> ThinkingBudget:
    return ThinkingBudget(num_tokens=num_tokens, start_ids=(300,), end_ids=(301, 302), **{"is_open": True, **more})


EVERYTHING = (
    regex(DATE),
    regex("(ab|cd){3,9}", ignore_eos=True, min_tokens=4),
    regex("[a-z ]{2,30}", allowed_token_ids=tuple(range(0, 600, 2)), presence_penalty=0.5),
    greedy(12, allowed_token_ids=tuple(range(20, 40)), logit_bias={25: 5.0}),
    greedy(12, bad_words=("e", "a", "the ")),
    greedy(12, bad_words_token_ids=((31, 32), (40,)), repetition_penalty=1.3),
    greedy(14, thinking_budget=budget(5)),
    greedy(14, thinking_budget=budget(0), min_tokens=3),
    greedy(14, thinking_budget=budget(3, is_open=False)),
)


def among_plain(params: tuple[SamplingParams, ...], num_tokens: int = 14) -> list[Ask]:
    """Each of these params, and plain requests among them."""
    each = [*params, *(greedy(num_tokens) for _ in range(1 + len(params) // 2))]
    Random(len(each)).shuffle(each)
    return list(zip(prompts(len(each), 40, seed=4), each, strict=True))


def is_guided_throughout(ran: Ran) -> bool:
    return ran.num_attended == 0 and ran.num_eager == 0 < ran.num_steps


@pytest.mark.parametrize("steps_in_flight", [1, 4, *[2] * FULL])
def test_guided_rows_get_the_tokens_of_a_synchronous_device_in_graphs(checkpoint: Path, steps_in_flight: int) -> None:
    asks = among_plain(EVERYTHING)
    right, ran = both(checkpoint, asks, late(steps_in_flight), steps_in_flight=steps_in_flight)
    assert ran.answers == right.answers and is_guided_throughout(ran)
    texts = [answer[0][1] for (_, params), answer in zip(asks, ran.answers, strict=True) if params in EVERYTHING[:2]]
    assert any(re.fullmatch(DATE, text) for text in texts) and any(re.fullmatch("(ab|cd){3,9}", text) for text in texts)


@pytest.mark.parametrize("mode", ["raw_logprobs", *["processed_logprobs"] * FULL])
def test_log_probabilities_are_those_of_the_guided_choice(checkpoint: Path, mode: str) -> None:
    params = (
        regex(DATE, 5, logprobs=4),
        regex("ab", 4, logprobs=4, ignore_eos=True),
        regex("[ab]", 4, logprobs=2, min_tokens=3, top_p=0.5),
        greedy(5, allowed_token_ids=(20, 21, 22), logprobs=2),
        greedy(7, thinking_budget=budget(4), logprobs=3),
    )
    right, ran = both(checkpoint, among_plain(params, 7), late(), logprobs_mode=mode)
    assert ran.answers == right.answers and is_guided_throughout(ran)
    for ours, theirs in zip(ran.outputs, right.outputs, strict=True):
        pairs = list(zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True))
        assert [mine.token_id for mine, _ in pairs] == [his.token_id for _, his in pairs]
        np.testing.assert_allclose([m.logprob for m, _ in pairs], [h.logprob for _, h in pairs], atol=1e-5)
        assert np.isfinite([mine.logprob for mine, _ in pairs]).all()


@pytest.mark.parametrize("swap_blocks", [0, 20], ids=["recompute", "swap"])
def test_preempted_guided_sequences_go_on_where_they_were(checkpoint: Path, swap_blocks: int) -> None:
    params = (
        *(regex("[a-z ]{60,90}", 28),) * 3,
        greedy(28, thinking_budget=budget(18)),
        greedy(28, bad_words_token_ids=((31, 32), (40, 41, 42))),
    )
    settings = {"num_gpu_blocks": 14, "max_model_len": 100, "block_size": 8, "num_cpu_blocks": swap_blocks}
    right, ran = both(checkpoint, among_plain(params, 28), late(), **settings)
    assert ran.num_preemptions > 0 and (ran.num_copied > 0) == (swap_blocks > 0)
    assert ran.answers == right.answers and is_guided_throughout(ran)


def test_drafts_among_guided_rows_change_no_answer(checkpoint: Path) -> None:
    asks = [([5, 6, 7, 8, 9] * 6, greedy(70)), ([11, 12] * 12, regex("[a-z ]{40,60}", 50)), ([3, 4], EVERYTHING[6])]
    settings = {"speculation": "ngram", "num_speculative_tokens": 12, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    right, ran = both(checkpoint, asks, late(), **settings)
    assert ran.answers == right.answers and is_guided_throughout(ran)


def test_the_host_waits_for_results_only_where_a_guide_depends_on_them(checkpoint: Path) -> None:
    def num_waits(params: SamplingParams) -> tuple[int, int]:
        """(waits, steps) of one request."""
        counted: Counter[str] = Counter()

        def count(engine: Engine) -> None:
            line: StepSubmitter = engine.pipeline.stages["execute"].runner.line  # type: ignore[attr-defined]
            await_results = line.await_results
            line.await_results = lambda grant: (counted.update(["waits"]), await_results(grant))  # type: ignore

        ran = asyncio.run(run(checkpoint, [([5, 6, 7], params)], late(), count, steps_in_flight=2))
        assert is_guided_throughout(ran)
        return counted["waits"], ran.num_steps

    assert num_waits(greedy(12, allowed_token_ids=(20, 21, 22), bad_words_token_ids=((22,),)))[0] == 0
    waits, steps = num_waits(greedy(20, thinking_budget=budget(12)))
    assert 2 <= waits <= 8 < steps, "only as the budget ends"
    waits, steps = num_waits(regex("[a-z]{20}", 20))
    assert waits >= steps - 2


def test_a_guide_masks_what_its_row_may_not_get_and_uploads_no_more() -> None:
    layout = GuideLayout(3, 70)
    assert (layout.num_words, layout.masks_at, layout.size) == (3, 8, 17)
    limits = TokenConstraints(2, 70)
    limits.start(started(1, allowed_token_ids=(0, 33, 69), bad_words_token_ids=((33,), (5, 69))))
    mask = np.full(3, -1, np.int32)
    limits.restrict(1, mask)
    assert mask.view(np.uint32).tolist() == [1, 0, 32]
    limits.note(np.array([1]), np.array([5]))
    limits.restrict(1, mask)
    assert mask.view(np.uint32).tolist() == [1, 0, 0]


def test_the_writer_leaves_out_rows_that_have_ended(checkpoint: Path) -> None:
    seen: list[int] = []
    write = GuideWriter.write

    def noting(self: GuideWriter, grant: Any, guide: Any) -> int:
        size = write(self, grant, guide)
        seen.append((size - self._layout.masks_at) // self._layout.num_words)
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuideWriter, "write", noting)
        ran = asyncio.run(run(checkpoint, among_plain((EVERYTHING[0],), 30), late(2), steps_in_flight=2))
    assert ran.num_attended == 0 and set(seen[-4:]) <= {0, 1} and 1 in seen
