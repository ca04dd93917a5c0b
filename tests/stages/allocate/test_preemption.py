"""Memory for a quarter of the running sequences: right answers, steady progress, little computed twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.messages import PlanReport, StepGrant, StepPlan
from millrace.stages.schedule.sequence import MAX_PREEMPTIONS
from millrace.stages.testing.scripted.engine import scripted_engine
from millrace.stages.testing.scripted.script import ALPHABET, Script
from tests.counts import count
from tests.model.checkpoints import make_checkpoint
from tests.stages.pressure import begin_together, swap_if_there_is_room

pytestmark = pytest.mark.slow

SHARE_OF_DEMAND = 0.25  # of the blocks that `max_num_seqs` sequences of average length come to hold
MAX_RECOMPUTED = 0.15  # of all computed tokens, where nothing is swapped
MAX_RECOMPUTED_WITH_SWAP = 0.02
CLOSE_LOGITS = 1e-6  # apart: float32 may take either, as it sums in another order when others are in the batch
AMPLE = 10_000  # host blocks


@dataclass
class Ask:
    """One request, and the right answer to it."""

    prompt: list[int]
    params: SamplingParams
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass
class Watch:
    """Counts plans and their results."""

    engine: Engine
    num_computed: int = 0  # tokens
    num_stuck: int = 0  # plans with work of which nothing moved, while no step was in flight to wait for
    preemptions: Counter[int] = field(default_factory=Counter)  # by sequence

    def __post_init__(self) -> None:
        self.scheduler = self.engine.core.stages.schedule.scheduler  # the engine has none any more when it has stopped
        allocator: Any = self.engine.pipeline.stages["allocate"].allocator  # type: ignore[attr-defined]
        serve = allocator.serve

        def watched(plan: StepPlan) -> tuple[StepGrant | None, PlanReport]:
            grant, report = serve(plan)
            self._see(plan, grant, report)
            return grant, report

        allocator.serve = watched

    def _see(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        scheduler = self.scheduler
        self.num_computed += int(report.num_granted.sum())
        self.num_stuck += grant is None and len(plan.slots) > 0 and scheduler.num_in_flight == 0
        for slot in (*plan.preempted, *report.preempted):
            sequence = scheduler.slots.sequences[slot]
            if sequence is not None:
                self.preemptions[sequence.sequence_id] += 1

    @property
    def recomputed_share(self) -> float:
        return self.scheduler.num_recomputed_tokens / self.num_computed

    @property
    def ways(self) -> set[str]:
        """How sequences were preempted."""
        return {how for how, _ in self.scheduler.preemptions}


def quarter_of_demand(asks: Sequence[Ask], max_num_seqs: int, block_size: int) -> int:
    """Blocks in a pool that holds a quarter of what `max_num_seqs` requests of these hold in the end, on average."""
    mean = sum(-(-ask.num_tokens // block_size) for ask in asks) / len(asks)
    return int(SHARE_OF_DEMAND * max_num_seqs * mean)


# -- with a scripted device: many requests, and the right answers are known


NUM_REQUESTS = count(300, 2_000)
SCRIPT = Script(key=5, eos_probability=0.01)


def scripted_asks(count: int, max_tokens: int) -> list[Ask]:
    """Prompts of 1 to 8 tokens, answers of up to `max_tokens`, some of which end early."""
    draw = Random(11)
    asks = []
    for i in range(count):
        prompt = [draw.choice(ALPHABET) for _ in range(draw.randint(1, 8))]
        params = SamplingParams(max_tokens=draw.randint(1, max_tokens), seed=i)
        asks.append(Ask(prompt, params, SCRIPT.expected(prompt, params)))
    return asks


def serve_scripted(asks: Sequence[Ask], max_num_seqs: int, **settings: Any) -> Watch:
    """Sends all requests at once, in virtual time. Checks every answer, and that no state remains."""
    config = EngineConfig(
        max_model_len=max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        num_gpu_blocks=quarter_of_demand(asks, max_num_seqs, settings["block_size"]),
        enable_prefix_caching=False,  # it would find again some of what a victim has lost
        max_admitted_requests=len(asks),
        max_waiting_requests=len(asks),
        **settings,
    )

    async def main(env: SimEnv) -> Watch:
        engine = scripted_engine(config, script=SCRIPT, env=env)
        async with engine:
            watch = Watch(engine)

            async def one(ask: Ask) -> None:
                outputs = [o async for o in engine.generate(ask.prompt, ask.params, output_kind="final")]
                assert outputs[-1].outputs[0].token_ids == ask.answer

            await asyncio.gather(*map(one, asks))
            await engine.check_quiet()
            return watch

    return run(main, seed=1, policy="fifo", max_callbacks=100_000_000).value


@pytest.mark.parametrize(
    ("num_cpu_blocks", "ways", "max_recomputed"),
    [
        (AMPLE, {"swap"}, MAX_RECOMPUTED_WITH_SWAP),
        (0, {"recompute"}, MAX_RECOMPUTED),
        (8, {"swap", "recompute"}, MAX_RECOMPUTED),
    ],
    ids=["ample room on the host", "no host", "room for little on the host"],
)
def test_requests_in_a_quarter_of_the_memory_are_answered_with_little_computed_twice(
    num_cpu_blocks: int, ways: set[str], max_recomputed: float
) -> None:
    num_requests = NUM_REQUESTS if len(ways) == 1 else NUM_REQUESTS // 4
    asks = scripted_asks(num_requests, max_tokens=20)
    watch = serve_scripted(asks, max_num_seqs=32, block_size=1, num_cpu_blocks=num_cpu_blocks)
    assert watch.ways == ways and watch.preemptions.total() > num_requests // 100, "there is hardly any pressure"
    assert watch.num_stuck == 0, f"{watch.num_stuck} plans of work ran nothing, and there was no step to wait for"
    assert max(watch.preemptions.values()) <= MAX_PREEMPTIONS
    assert watch.recomputed_share <= max_recomputed


def test_where_four_sequences_fit_and_answers_are_long_little_is_computed_twice() -> None:
    watch = serve_scripted(scripted_asks(300, max_tokens=40), max_num_seqs=16, block_size=2, num_cpu_blocks=0)
    assert watch.recomputed_share <= MAX_RECOMPUTED


# -- with a real model, whose answers must be those that it gives with room for all


NUM_REAL = 60
VOCAB_SIZE = 640


class Reference:
    """A tiny checkpoint, requests, and its answers to them with memory for all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: PreTrainedModel = make_checkpoint("llama", folder, vocab_size=VOCAB_SIZE)
        draw = Random(3)
        self.asks = []
        for _ in range(NUM_REAL):
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 24))]
            num_new = draw.randint(4, 36)
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            self.asks.append(Ask(prompt, params, [0] * num_new))
        answers, _ = serve_real(self, num_gpu_blocks=NUM_REAL * 16, num_cpu_blocks=0)
        for ask, answer in zip(self.asks, answers, strict=True):
            ask.answer[:] = answer

    def gap(self, tokens: Sequence[int]) -> float:
        """How far the two likeliest tokens behind `tokens` are apart."""
        with torch.inference_mode():
            best = self.model(torch.tensor([tokens])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


def serve_real(reference: Reference, **sizes: Any) -> tuple[list[list[int]], Watch]:
    """The answers of an engine on the checkpoint to all requests at once."""
    config = EngineConfig(
        model=str(reference.folder),
        dtype="float32",
        device="cpu",
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=4,
        **sizes,
    )

    async def main() -> tuple[list[list[int]], Watch]:
        async with Engine(config) as engine:
            swap_if_there_is_room(engine)
            begin_together(engine, len(reference.asks))
            watch = Watch(engine)

            async def one(ask: Ask) -> list[int]:
                outputs = [o async for o in engine.generate(ask.prompt, ask.params, output_kind="final")]
                return outputs[-1].outputs[0].token_ids

            return await asyncio.gather(*map(one, reference.asks)), watch

    return asyncio.run(main())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("num_cpu_blocks", "way"), [(500, "swap"), (0, "recompute"), (9, "swap")], ids=["ample", "no host", "little"]
)
def test_a_real_model_in_a_quarter_of_the_memory_answers_as_with_room_for_all(
    reference: Reference, num_cpu_blocks: int, way: str
) -> None:
    num_blocks = quarter_of_demand(reference.asks, max_num_seqs=16, block_size=4)
    answers, watch = serve_real(reference, num_gpu_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
    assert way in watch.ways and watch.preemptions.total() >= 5, "there is hardly any pressure"
    assert watch.num_stuck == 0
    assert max(watch.preemptions.values()) <= MAX_PREEMPTIONS
    num_close = 0
    for ask, answer in zip(reference.asks, answers, strict=True):
        assert len(answer) == len(ask.answer)
        if answer != ask.answer:
            place = next(i for i, pair in enumerate(zip(answer, ask.answer, strict=True)) if pair[0] != pair[1])
            gap = reference.gap([*ask.prompt, *ask.answer[:place]])
            assert gap < CLOSE_LOGITS, f"answer token {place} is {answer[place]}, the logits are {gap:.2e} apart"
            num_close += 1
    assert num_close <= NUM_REAL // 20, "logits that close are rare"
