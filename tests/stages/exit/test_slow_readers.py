"""Clients that do not read: they are parked, delay no other client, and lose no text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.wakeups import WakeupBatch
from millrace.stages.exit.request_outbox import RequestOutbox
from millrace.stages.exit.slow_readers import SlowReaders
from millrace.stages.messages import Finish, FinishReason, Prompt, Request, StepGrant
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import as_token_ids
from tests.stages.front import request

pytest_plugins = ["millrace.stages.testing.pytest_plugin"]

SIZES = {"num_gpu_blocks": 400, "block_size": 8, "max_model_len": 256, "max_unread_tokens": 8, "num_cpu_blocks": 2000}


def _request(name: str, i: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i)
    return Request(name, (Prompt(token_ids=as_token_ids([65 + i % 26] * (3 + i % 7))),), params)


def _right(engine: Any, request: Request) -> list[int]:
    return engine.model.script.expected(request.prompts[0].token_ids.tolist(), request.params)


async def _read(outbox: Any) -> list[int]:
    return [token async for deltas in outbox for delta in deltas for token in delta.token_ids]


async def _until(condition: Any) -> None:
    for _ in range(5_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def test_an_answer_that_is_not_read_stops_soon_and_continues_when_it_is_read(scripted: Any):
    async def main(engine: Any) -> None:
        request = _request("stalled", 0, 200)
        outbox = await engine.submit(request)
        await _until(lambda: engine.scheduler.num_parked == 1)
        num_steps = engine.model.num_steps
        await asyncio.sleep(0.05)
        assert engine.model.num_steps <= num_steps + 3, "it is served though it is parked"
        assert outbox.num_generated_tokens <= 8 + 4
        assert engine.health.is_ready
        assert await _read(outbox) == _right(engine, request)
        assert engine.scheduler.num_preemptions == 0
        await engine.check_quiet()

    scripted(main, **SIZES)


class _Steps:
    """The sequences to which each step of an engine gave a token, as its device saw them: independent of when
    clients read."""

    def __init__(self, engine: Any) -> None:
        self.of: dict[int, list[int]] = {}  # sequence -> numbers of steps
        self._sequences: dict[int, int] = {}  # of slots
        self._forward, self._num_steps = engine.model.forward, 0
        engine.model.forward = self._record

    def _record(self, grant: StepGrant) -> Any:
        self._sequences.update({started.slot: started.sequence_id for started in grant.started})
        self._num_steps += 1
        for slot in grant.slots[grant.is_sampled].tolist():
            self.of.setdefault(self._sequences[slot], []).append(self._num_steps)
        return self._forward(grant)

    def gaps(self, outbox: Any) -> list[int]:
        """In steps, between the tokens of an answer."""
        return [after - before for before, after in pairwise(self.of[outbox.request.first_sequence_id])]

    def num_tokens(self, outbox: Any) -> int:
        """Of an answer so far."""
        return len(self.of[outbox.request.first_sequence_id])


async def _gaps(engine: Any, steps: _Steps, num: int) -> list[int]:
    """Steps between two tokens of the same answer, for `num` answers at once that are read as they come."""

    async def read_well(request: Request) -> list[int]:
        outbox = await engine.submit(request, wait=True)
        assert await _read(outbox) == _right(engine, request)
        return steps.gaps(outbox)

    found = await asyncio.gather(*(read_well(_request(f"r{i}", i + 50, 100)) for i in range(num)))
    return sorted(gap for gaps in found for gap in gaps)


def test_fifty_stalled_readers_among_a_hundred_cost_the_others_no_step(scripted: Any):
    """Memory is for seventy of the hundred, so stalled ones are swapped out. Then they read, and nothing is lost or
    repeated. In steps, as time is what the machine makes of it."""

    async def main(engine: Any) -> None:
        steps = _Steps(engine)
        alone = await _gaps(engine, steps, 50)
        stalled = [_request(f"s{i}", i, 240) for i in range(50)]
        outboxes = [await engine.submit(request, wait=True) for request in stalled]
        await _until(lambda: engine.scheduler.num_parked == 50)
        before = [steps.num_tokens(outbox) for outbox in outboxes]
        beside = await _gaps(engine, steps, 50)
        after = [steps.num_tokens(outbox) for outbox in outboxes]
        assert set(alone) == set(beside) == {1}, "somebody waited"
        served = [after_it - before_it for before_it, after_it in zip(before, after, strict=True)]
        assert max(served) <= 3, "the stalled ones were served by more than the steps that were in flight"
        assert engine.scheduler.preemptions["swap", "blocks"] > 0
        assert max(s.num_preempted for s in engine.scheduler.sequences.values()) == 0
        answers = await asyncio.gather(*map(_read, outboxes))
        assert answers == [_right(engine, request) for request in stalled]
        assert engine.scheduler.num_recomputed_tokens == 0
        await engine.check_quiet()

    sizes = SIZES | {"num_gpu_blocks": 720, "enable_prefix_caching": False, "max_num_seqs": 128}
    scripted(main, max_num_batched_tokens=256, step_s=0.001, **sizes)


def test_parked_sequences_give_their_slots_to_any_that_waits(scripted: Any):
    async def main(engine: Any) -> None:
        stalled = [_request(f"s{i}", i, 200) for i in range(2)]
        outboxes = [await engine.submit(request) for request in stalled]
        await _until(lambda: engine.scheduler.num_parked == 2)
        other = _request("r", 9, 5)
        assert await _read(await engine.submit(other)) == _right(engine, other)
        assert engine.scheduler.preemptions["swap", "slot"] >= 1
        assert await asyncio.gather(*map(_read, outboxes)) == [_right(engine, request) for request in stalled]
        await engine.check_quiet()

    scripted(main, **SIZES, max_num_seqs=2)


def test_an_answer_that_stays_unread_too_long_ends_and_frees_everything(scripted: Any):
    async def main(engine: Any) -> None:
        request = _request("stalled", 0, 200)
        outbox = await engine.submit(request)
        await _until(lambda: outbox.cause is not None)
        assert outbox.cause == "stalled_reader"
        await engine.check_quiet()
        deltas = [delta async for deltas in outbox for delta in deltas]
        assert deltas[-1].finish_reason == "abort"
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == _right(engine, request)[: len(tokens)] and len(tokens) >= 8

    scripted(main, max_parked_s=0.1, **SIZES)


@pytest.mark.parametrize("ends", ["cancel", "read"])
def test_choices_of_one_request_are_parked_and_end_together(scripted: Any, ends: str):
    async def main(engine: Any) -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True, n=4, seed=1)
        outbox = await engine.submit(Request("four", (Prompt(token_ids=as_token_ids([70] * 20)),), params))
        await _until(lambda: engine.scheduler.num_parked == 4)
        if ends == "cancel":
            engine.abort("four")
        else:
            assert len(await _read(outbox)) == 4 * 60
        await engine.check_quiet()
        assert engine.scheduler.num_parked == 0

    scripted(main, **SIZES)


# -- parking and unparking


class Parked:
    """A parking that records its posts and ends, with one request of three choices."""

    def __init__(self, stall_s: float) -> None:
        self.said: list[tuple[int, str]] = []
        self.ended: list[tuple[str, str]] = []
        self.parking = SlowReaders(stall_s, self._post, self._end)
        self.outbox = RequestOutbox(replace(request("p", n=3), first_sequence_id=7), WakeupBatch().wakeup())

    def _post(self, sequence_id: int, cause: str) -> None:
        self.said.append((sequence_id, cause))

    def _end(self, request_id: str, cause: str) -> None:
        self.ended.append((request_id, cause))

    def park(self, *indices: int) -> None:
        for index in indices:
            self.parking.park(self.outbox.choices[index])


@sim_test(seeds=1)
async def test_the_next_read_unparks_all_choices_of_a_request_and_later_reads_do_nothing(env: SimEnv):
    them = Parked(stall_s=10.0)
    them.park(0, 2)
    assert them.said == [(7, "park"), (9, "park")]
    them.outbox.has_unread = True
    them.outbox.poll()
    assert them.said[2:] == [(7, "unpark"), (9, "unpark")]
    assert not any(choice.is_parked for choice in them.outbox.choices)
    them.outbox.has_unread = True
    them.outbox.poll()
    await env.sleep(60.0)
    assert len(them.said) == 4 and them.ended == []


@sim_test(seeds=1)
async def test_a_choice_that_finished_while_it_was_parked_is_not_unparked(env: SimEnv):
    them = Parked(stall_s=10.0)
    them.park(0, 1)
    them.outbox.choices[0].finish = Finish(FinishReason.LENGTH)
    them.outbox.has_unread = True
    them.outbox.poll()
    assert them.said[2:] == [(8, "unpark")] and not them.outbox.choices[0].is_parked


@sim_test(seeds=1)
async def test_a_requests_time_runs_from_its_first_parked_choice_and_anew_after_each_read(env: SimEnv):
    them = Parked(stall_s=10.0)
    them.park(0)
    await env.sleep(9.0)
    them.outbox.has_unread = True
    them.outbox.poll()
    them.park(0)
    await env.sleep(9.0)
    them.park(1)  # later: it makes the time no longer
    assert them.ended == []
    await env.sleep(1.5)
    assert them.ended == [("r", "stalled_reader")]


@sim_test(seeds=1)
async def test_a_standstill_of_this_process_ends_no_reader(env: SimEnv):
    them = Parked(stall_s=10.0)
    them.park(0)
    await env.sleep(9.0)
    env.loop.stand_still(3_600.0)
    await env.sleep(0.9)
    assert them.ended == []
    await env.sleep(2.0)
    assert them.ended == [("r", "stalled_reader")]


@sim_test(seeds=1)
async def test_a_request_that_is_forgotten_is_neither_ended_nor_told_of(env: SimEnv):
    them = Parked(stall_s=10.0)
    them.park(0)
    them.parking.forget(them.outbox)
    them.parking.forget(them.outbox)  # a request ends once, whatever was posted before
    them.outbox.has_unread = True
    them.outbox.poll()
    await env.sleep(60.0)
    assert them.said == [(7, "park")] and them.ended == []
