"""The status of several engine processes as that of one: sums, with slots and blocks side by side."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from millrace.stages.engine.engine_status import CoreReport
from millrace.stages.engine.read_status import owners_of
from millrace.stages.fleet.merged_status import merged, remains
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import SMALL, scripted_engine
from tests.stages.split.test_split import report_of

NUM_SLOTS = SMALL.max_num_seqs


def report_of_a_running_engine() -> CoreReport:
    async def main() -> CoreReport:
        async with scripted_engine(SMALL, num_cpu_blocks=7) as engine:
            stream = engine.generate("abc", SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
            report = report_of(engine)
            await stream.aclose()  # type: ignore[attr-defined]
        return report

    return asyncio.run(main())


def test_two_processes_are_shown_as_one_with_twice_the_slots_and_blocks() -> None:
    one = report_of_a_running_engine()
    early = [replace(stage, last_progress_s=stage.last_progress_s - 5.0, is_busy=True) for stage in one.stages]
    both = merged({0: one, 2: replace(one, stages=early)}, [], NUM_SLOTS, 3)

    cache, own = both.core.cache, one.core.cache
    assert cache.pool.num_blocks == 2 * own.pool.num_blocks and cache.pool.num_in_use == 2 * own.pool.num_in_use > 0
    assert cache.host is not None and cache.host.pool.num_blocks == 14
    scheduler, alone = both.core.scheduler, one.core.scheduler
    assert scheduler.num_running == 2 and scheduler.completed_step == alone.completed_step
    assert scheduler.max_num_seqs == 3 * NUM_SLOTS
    assert both.core.sequences is not None and both.core.sequences.slots.tolist() == [0, 2 * NUM_SLOTS]
    assert len(cache.num_held) == 3 * NUM_SLOTS and cache.num_held[2 * NUM_SLOTS] == own.num_held[0]
    assert not cache.num_held[NUM_SLOTS : 2 * NUM_SLOTS].any() and cache.waste == own.waste
    assert list(both.core.step_tokens.counts) == [2 * number for number in one.core.step_tokens.counts]
    assert cache.blocks is not None and own.blocks is not None
    assert cache.blocks.num_held.tolist() == cache.num_held.tolist()
    assert cache.blocks.table_blocks.tolist() == [
        *own.blocks.table_blocks.tolist(),
        *(own.blocks.table_blocks + own.pool.num_blocks).tolist(),
    ]
    for stage, single in zip(both.stages, one.stages, strict=True):
        assert stage.last_progress_s == single.last_progress_s and stage.is_busy == single.is_busy
        assert stage.busy == 2 * single.busy and stage.wait_us.total == 2 * single.wait_us.total
        assert list(stage.wait_us.counts) == [2 * number for number in single.wait_us.counts]
    assert owners_of(both.core.sequences, lambda _: "r") == {0: "r", 2 * NUM_SLOTS: "r"}


def test_no_counter_falls_when_a_process_dies_and_what_it_held_is_gone() -> None:
    one = report_of_a_running_engine()
    twice = merged({0: remains(one)}, [remains(one)], 0)  # two have died
    after = merged({1: one}, [twice], NUM_SLOTS)
    assert list(after.core.step_tokens.counts) == [3 * number for number in one.core.step_tokens.counts]
    now, own = after.core.cache, one.core.cache
    assert own.prefixes is not None and now.prefixes is not None
    assert now.prefixes.num_queries == 3 * own.prefixes.num_queries > 0
    for name in ("num_preemptions", "num_recomputed_tokens"):
        assert getattr(after.core.scheduler, name) == 3 * getattr(one.core.scheduler, name)
    assert str(now.pool) == str(own.pool) and str(now.host) == str(own.host)
    assert after.core.scheduler.num_running == 1
    assert after.core.sequences is not None and len(after.core.sequences.ids) == 1
    assert after.stages[0].busy == 3 * one.stages[0].busy
    for edge, single in zip(after.channels, one.channels, strict=True):
        assert edge.stats.depth == single.stats.depth and edge.stats.num_sent == 3 * single.stats.num_sent
