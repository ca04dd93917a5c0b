"""The device's queue of steps: order, whatever the stages do."""

from __future__ import annotations

import asyncio
import random

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.workers.step_queue import StepQueue

FORWARD, SAMPLE = 0, 1


@sim_test(seeds=9)
async def test_phases_run_in_step_order_whatever_order_they_are_submitted_in(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2)
    ran: list[tuple[int, int]] = []
    tickets = [(step, phase) for step in range(4) for phase in (FORWARD, SAMPLE)]
    shuffled = list(tickets)
    random.Random(env.seed).shuffle(shuffled)
    await asyncio.gather(*(queue.submit(*ticket, lambda t=ticket: ran.append(t)) for ticket in shuffled))
    assert ran == tickets
    assert queue.next_step == 4
    await env.aclose()


@sim_test(seeds=3)
async def test_the_next_step_waits_for_the_last_phase_of_the_one_before(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2, first_step=7)
    ran: list[str] = []
    first = queue.submit(7, FORWARD, lambda: ran.append("forward 7"))
    second = queue.submit(8, FORWARD, lambda: ran.append("forward 8"))
    await first
    await env.sleep(1.0)
    assert ran == ["forward 7"] and queue.next_step == 7
    queue.submit(7, SAMPLE, lambda: ran.append("sample 7"))
    await second
    assert ran == ["forward 7", "sample 7", "forward 8"]
    await env.aclose()


@sim_test(seeds=3)
async def test_a_skipped_phase_lets_the_next_step_begin_and_skipping_twice_does_nothing(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2)
    ran: list[str] = []
    later = queue.submit(1, FORWARD, lambda: ran.append("forward 1"))
    await queue.submit(0, FORWARD, lambda: ran.append("forward 0"))
    for _ in range(2):
        queue.skip(0, SAMPLE)
    queue.skip(0, FORWARD)  # it ran: nothing to skip
    await later
    assert ran == ["forward 0", "forward 1"]
    await env.aclose()


@sim_test(seeds=3)
async def test_an_error_reaches_its_own_phase_only(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2)

    def out_of_memory() -> None:
        raise MemoryError("no room")

    failed = queue.submit(0, FORWARD, out_of_memory)
    sampled = queue.submit(0, SAMPLE, lambda: "ran")
    with pytest.raises(MemoryError, match="no room"):
        await failed
    assert await sampled == "ran"
    await env.aclose()


@sim_test(seeds=3)
async def test_a_cancelled_early_phase_does_not_run_and_delays_no_other(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2)
    ran: list[str] = []
    early = queue.submit(0, SAMPLE, lambda: ran.append("sample 0"))
    early.cancel()
    queue.submit(0, FORWARD, lambda: ran.append("forward 0"))
    await queue.submit(1, FORWARD, lambda: ran.append("forward 1"))
    assert ran == ["forward 0", "forward 1"]
    await env.aclose()


@sim_test(seeds=2)
async def test_a_phase_submitted_twice_is_a_bug_and_says_so(env: SimEnv) -> None:
    queue = StepQueue(env.worker("device"), num_phases=2)
    await queue.submit(0, FORWARD, lambda: None)
    with pytest.raises(AssertionError, match="step 0 phase 0 was submitted before; next is \\(0, 1\\)"):
        queue.submit(0, FORWARD, lambda: None)
    early = queue.submit(1, FORWARD, lambda: None)
    with pytest.raises(AssertionError, match="step 1 phase 0"):
        queue.submit(1, FORWARD, lambda: None)
    early.cancel()
    await env.aclose()
