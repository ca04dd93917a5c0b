"""The trace of slots and blocks: it gives the holder of each block at any time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.trace.tracer import NO_SLOT, EventKind, Records
from millrace.stages import SamplingParams
from millrace.stages.allocate.tiers.block_pool import BlockState
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine

NEVER_ENDS = Script(eos_probability=0.0)
TIGHT = {"num_gpu_blocks": 34, "max_num_seqs": 8, "block_size": 8, "max_model_len": 256, "num_cpu_blocks": 40}


class Memory:
    """The holder of each block, from KV_RANGE records alone."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.names = engine.pipeline.tracer.names()
        self.states = np.full(engine.pool.num_blocks, BlockState.FREE, np.int8)
        self.held: dict[int, list[int]] = {}

    def note(self, records: Records) -> None:
        for record in records[records["kind"] == EventKind.KV_RANGE]:
            slot, first, count, name = (int(record[column]) for column in "abcd")
            if self.names[name] == "left":
                assert len(self.held.pop(slot)) == count
                continue
            blocks = list(range(first, first + count))
            self.states[blocks] = BlockState[self.names[name].upper()]
            if slot == NO_SLOT:
                assert self.names[name] != "in_use"
            else:
                self.held.setdefault(slot, []).extend(blocks)

    def check(self, engine: ScriptedEngine) -> None:
        assert self.states.tolist() == engine.pool.state.tolist()
        tables = engine.block_tables
        held = {
            slot: sorted(tables.blocks[slot, : capacity // tables.block_size].tolist())
            for slot, capacity in enumerate(tables.capacity.tolist())
            if capacity
        }
        assert {slot: sorted(blocks) for slot, blocks in self.held.items()} == held


async def ask(engine: Any, number: int, max_tokens: int) -> None:
    prompt = [65 + number % 3] * (9 + number % 20)  # some begin alike, so blocks are shared
    await asyncio.sleep(0.0004 * number)
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=number)):
        pass


@pytest.mark.parametrize("more", [{}, {"num_cpu_blocks": None}, {"enable_prefix_caching": False}])
@sim_test(seeds=2)
async def test_the_blocks_of_every_slot_can_be_told_from_the_trace_alone(env: SimEnv, more: dict[str, Any]):
    async with scripted_engine(script=NEVER_ENDS, env=env, **(TIGHT | more)) as engine:
        tracer, memory, num_checks = engine.pipeline.tracer, Memory(engine), 0
        serve = engine.parts.allocate.handle

        async def served_and_checked(batch: Any, out: Any) -> None:
            nonlocal num_checks
            num_before = len(tracer.read_all())
            await serve(batch, out)
            engine.parts.allocate._kv.flush()  # type: ignore[union-attr]
            memory.note(tracer.read_all()[num_before:])
            memory.check(engine)
            num_checks += 1

        engine.parts.allocate.handle = served_and_checked  # type: ignore[method-assign]
        await asyncio.gather(*(ask(engine, number, 30 + number) for number in range(12)))
        records = tracer.read_all()
        preempted = records[records["kind"] == EventKind.PREEMPTED]
        assert num_checks > 60 and len(preempted) >= 2
        resumed = records[records["kind"] == EventKind.RESUMED]
        assert len(resumed) == len(preempted) == engine.scheduler.num_preemptions
        admitted = records[records["kind"] == EventKind.REQUEST_ADMITTED]
        assert len(admitted) == 12 and len(set(admitted["a"].tolist())) == 12


@sim_test(seeds=2, policies=("fifo",))
async def test_in_steady_decoding_only_new_blocks_are_told(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        async for _ in engine.generate([3, 4, 5], SamplingParams(max_tokens=300)):
            pass
        records = engine.pipeline.tracer.read_all()
    ranges = records[records["kind"] == EventKind.KV_RANGE]
    assert 19 <= len(ranges) <= 23  # 303 tokens in blocks of 16, and what becomes of them at the end
    assert len(records[records["kind"] == EventKind.KV_POOL]) <= 4


@sim_test(seeds=2, policies=("fifo",), thread_delay_s=(0.001, 0.001))
async def test_a_client_that_stops_reading_is_in_the_trace_from_then_until_it_reads_again(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, max_unread_tokens=8) as engine:
        reader = engine.generate([3, 4, 5], SamplingParams(max_tokens=60))
        await anext(reader)
        await asyncio.sleep(3.0)
        async for _ in reader:
            pass
        records = engine.pipeline.tracer.read_all()
    (parked,) = records[records["kind"] == EventKind.PARKED]
    (unparked,) = records[records["kind"] == EventKind.UNPARKED]
    assert 2.8e9 < unparked["time_ns"] - parked["time_ns"] < 3.0e9
    assert parked["c"] == unparked["c"] and parked["b"] >= 1
