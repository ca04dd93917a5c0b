"""Drafts that the device accepts by itself: the host's rule, the same answers, and no step waits for the host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout import step_state
from millrace.stages.engine.engine import Engine
from millrace.stages.messages import FinishReason, StepGrant
from millrace.stages.params import SamplingParams
from millrace.stages.sample.draft_acceptance import DraftRuns
from millrace.stages.sample.slot_params import ENDED, SlotParams
from millrace.stages.schedule.speculation import Speculation
from tests.counts import FULL
from tests.model.checkpoints import make_checkpoint
from tests.stages.backends.cuda.test_step_inputs import Side
from tests.stages.late_engines import Ask, Ran, greedy, late, run
from tests.stages.step_walk import EOS, VOCAB_SIZE, DraftedWalk

LOOKUP = {"num_speculative_tokens": 12, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("seed", range(6))
def test_the_device_accepts_the_drafts_that_the_host_would(seed: int) -> None:
    walk = DraftedWalk(Random(seed), num_slots=5, most=(1, 3, 20)[seed % 3])
    side = Side(walk)
    table = SlotParams(walk.num_slots, VOCAB_SIZE, walk.max_model_len, [EOS])
    num_accepted = 0
    for _ in range(20):
        of = walk.step()
        for one in of.started:
            table.start(one)
        slots, runs = of.logits_slots, DraftRuns.of(of) or without_drafts(of)
        chosen = walk.choose(of, runs.drafts.tolist())
        told = side.note_tokens(of, side.inputs(of), chosen)
        right = np.full(told.shape, -1)
        right[1] = 0
        alive = np.flatnonzero(table.needs[slots] & ENDED == 0)
        ids, offsets = np.array(chosen)[alive], runs.offsets[alive]
        counting = runs.take(alive).that_count(np.maximum(ids, 0))
        at, ids, offsets = slots[alive][counting], ids[counting], offsets[counting]
        finishes = table.note_tokens(at, table.num_generated[at] + offsets, np.maximum(ids, 0), ids < 0)
        kept = runs.take(alive).up_to_the_end(counting, finishes)
        right[:, alive[counting[kept]]] = np.maximum(ids, 0)[kept], finishes[kept]
        assert told.tolist() == right.tolist()
        for slot, token_id, reason in zip(at[kept].tolist(), ids[kept].tolist(), finishes[kept].tolist(), strict=True):
            walk.chose(slot, max(token_id, 0), is_end=reason != FinishReason.NONE)
        for slot in set(at.tolist()):
            tokens = walk.tokens[slot]
            assert side.slots.state[slot, step_state.TOKENS] == len(tokens)
            assert side.slots.tokens[slot, : len(tokens)].tolist() == tokens
        num_accepted += int((offsets[kept] > 0).sum())
    assert num_accepted > 5


def without_drafts(of: StepGrant) -> DraftRuns:
    count = len(of.logits_slots)
    return DraftRuns(np.zeros(count, np.intp), np.full(count, -1))


# -- whole engines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


RARE = tuple(range(628, 640))  # more stop tokens than the device knows
ASKS: list[Ask] = [  # whose answers repeat themselves
    ([5, 6, 7, 8, 9] * 6, greedy(60)),
    ([11, 12] * 12, SamplingParams(max_tokens=50, temperature=0.05, seed=3, ignore_eos=True)),
    ([5, 6, 7] * 7, greedy(50, logprobs=2)),
    ([8, 9] * 9, greedy(60)),
]


def ran_with(
    checkpoint: Path, asks: list[Ask], speculation: str, steps: int, **more: Any
) -> tuple[Ran, Speculation, int]:
    """(what it answered, its speculation, and how often the host awaited the results of earlier steps)."""
    found: list[Speculation] = []
    num_waits = 0

    def watch(engine: Engine) -> None:
        found.append(engine.core.stages.schedule.scheduler.speculation)
        line = engine.pipeline.stages["execute"].runner.line  # type: ignore[attr-defined]
        await_results = line.await_results

        def count(grant: StepGrant) -> None:
            nonlocal num_waits
            num_waits += 1
            await_results(grant)

        line.await_results = count

    settings = {"speculation": speculation, "steps_in_flight": steps, **LOOKUP, **more}
    ran = asyncio.run(run(checkpoint, asks, late(steps), watch, **settings))
    return ran, found[0], num_waits


@pytest.fixture(scope="module")
def right(checkpoint: Path) -> Ran:
    """The answers without drafts."""
    return ran_with(checkpoint, ASKS, "off", 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2, 4] if FULL else [2])
def test_answers_are_those_without_drafts_and_no_step_waits(checkpoint: Path, right: Ran, steps_in_flight: int) -> None:
    (stopped,), asks = right.answers[3], list(ASKS)
    stop = stopped[0][30]  # a token in the middle of an answer ends it, which the host alone knows
    asks[3] = (asks[3][0], greedy(60, stop_token_ids=(*RARE, stop)))
    ran, speculation, num_waits = ran_with(checkpoint, asks, "ngram", steps_in_flight)
    assert ran.answers[:3] == right.answers[:3]
    assert ran.answers[3][0][0] == stopped[0][: stopped[0].index(stop) + 1] and ran.answers[3][0][2] == "stop"
    assert ran.num_attended == ran.num_eager == num_waits == 0
    assert speculation.num_accepted_tokens > 40
    for ours, theirs in zip(ran.outputs[:3], right.outputs, strict=False):
        pairs = list(zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True))
        assert all(mine.token_id == his.token_id for mine, his in pairs)
        np.testing.assert_allclose([m.logprob for m, _ in pairs], [h.logprob for _, h in pairs], atol=1e-5)
