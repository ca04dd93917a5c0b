"""Requests of a dead engine process go on in another one, in virtual time, whatever comes between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.runtime.pipeline import Health
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.exit.outboxes import Outboxes
from millrace.stages.fleet.core_keeper import CoreKeeper
from millrace.stages.fleet.resuming import Resuming
from millrace.stages.messages import AdapterRef, Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.split.inflight_requests import GROUP_FROM
from tests.stages.fleet.test_fleet_parts import Core, fleet
from tests.stages.split.test_split import token_request, tokens

PARAMS = SamplingParams(max_tokens=50, seed=3)


class Exit(Outboxes):
    """Raises for the sequences in `broken`, and keeps what it posts."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[int] = set()
        self.posted: list[tuple[int, str]] = []

    def awaits(self, sequence_id: int) -> bool:
        if sequence_id in self.broken:
            raise KeyError("a bug")
        return super().awaits(sequence_id)

    def _post(self, sequence_id: int, cause: str) -> None:
        self.posted.append((sequence_id, cause))


class Front:
    """Two cores without processes, and what resumes their requests."""

    def __init__(self, env: SimEnv, capacity: int) -> None:
        self.env, self.exit = env, Exit()
        self.cores, self.table, (self.a, self.b) = fleet(2, capacity)
        for core in (self.a, self.b):
            core.client = None  # type: ignore[attr-defined]
        self.exit.on_end.append(lambda outbox, cause, error: self.table.forget(outbox.request_id))
        self.resuming = Resuming(env, EngineConfig(), self.table, self.cores, self.exit)
        self.resuming.start()

    def ask(self, name: str, num_prompts: int = 1, adapter: str = "") -> int:
        """Opens a request and sends its first prompt. Returns that one's sequence id."""
        outbox = self.exit.open(Request(name, (Prompt(text="x"),) * num_prompts, PARAMS))
        prompt = token_request(name, outbox.request.first_sequence_id)
        assert self.cores.place(replace(prompt, adapter=AdapterRef(name, adapter)) if adapter else prompt)
        return outbox.request.first_sequence_id

    async def die(self, core: Core) -> None:
        core.is_serving = False
        self.table.note_death(core.index)
        self.resuming.wake()
        await self.env.sleep(0.1)


def simulate(test: Callable[[Front], Awaitable[None]], capacity: int = 100) -> None:
    async def live(env: SimEnv) -> None:
        front = Front(env, capacity)
        try:
            await test(front)
        finally:
            await front.resuming.stop()

    run(live, seed=0)


def test_a_prompt_that_comes_while_its_request_waits_for_room_is_sent_with_it() -> None:
    async def test(front: Front) -> None:
        first = front.ask("r", num_prompts=2)
        front.ask("x")  # fills the other process
        front.table.admit([first])
        await front.die(front.a)
        assert front.cores.place(token_request("r", first + 1, index=1)) and front.b.sent == ["x"]
        for _ in range(2):
            front.b.requests.pay(1)
            await front.env.sleep(0.1)
        assert front.b.sent == ["x", "r", "r"] and front.table.core_of("r") == 1

    simulate(test, capacity=1)


def test_requests_wait_for_their_adapter_and_those_behind_them_do_not() -> None:
    async def test(front: Front) -> None:
        held = {"here"}
        for core in (front.a, front.b):
            core.adapters = SimpleNamespace(holds=held.__contains__)  # type: ignore[attr-defined]
        held.add("late")
        ids = [front.ask(name, adapter=adapter) for name, adapter in (("a", "late"), ("b", "late"), ("c", ""))]
        ids += [front.ask(name, adapter=adapter) for name, adapter in (("d", ""), ("e", "late"), ("f", "here"))]
        held.remove("late")
        there = set(front.a.sent)
        front.table.admit(ids[:3])  # suspects
        await front.die(front.a)
        resumed = [name for name in front.b.sent if name in there]
        assert there == {"a", "c", "e"} and resumed == ["c"]
        held.add("late")
        front.exit.end("c", "stop")  # its trial is over
        front.resuming.wake()
        await front.env.sleep(0.1)
        assert set(front.b.sent) == set("abcdef")

    simulate(test)


def test_a_request_that_cannot_be_resumed_ends_and_those_behind_it_are_resumed() -> None:
    async def test(front: Front) -> None:
        front.b.is_serving = False
        waiting, running = [front.ask(name) for name in "ab"], [front.ask(name) for name in "cd"]
        front.table.admit(running)
        front.b.is_serving = True
        front.exit.broken = {waiting[0], running[1]}  # the first of each kind that is resumed
        await front.die(front.a)
        assert front.b.sent == ["b", "c"] and set(front.exit.live) == {"b", "c"} == set(front.table.request_ids())
        assert not front.resuming._task.done()  # type: ignore[union-attr]

    simulate(test)


@pytest.mark.parametrize("count", [GROUP_FROM, 100])
def test_many_suspects_are_cleared_in_few_trials(count: int) -> None:
    async def test(front: Front) -> None:
        front.b.is_serving = False
        firsts = [front.ask(f"r{number}") for number in range(count)]
        front.b.is_serving = True
        front.table.admit(firsts)
        front.table.note(tokens(0, [(first, 0, 7) for first in firsts]), 0)
        began: list[int] = []
        front.b.is_serving, front.a.is_serving = True, False
        front.table.note_death(0)
        front.resuming.wake()
        num_tokens, num_steps = dict.fromkeys(firsts, 1), 0
        while front.table.orphans()[0] or front.resuming.is_trying:
            await front.env.sleep(0.02)
            if (now := len(front.table._on_trial)) and (not began or began[-1] != now):
                began.append(now)
            running = [one for one in firsts if f"r{one}" in front.b.sent]
            front.table.note(tokens(num_steps, [(one, num_tokens[one], 7) for one in running]), 1)
            num_tokens.update((one, num_tokens[one] + 1) for one in running)
            num_steps += 1
        assert sorted(front.b.sent) == sorted(f"r{number}" for number in range(count))
        if count == GROUP_FROM:
            assert set(began) == {1} and num_steps >= count * front.resuming._num_tokens
        else:
            assert {1, 2, 4, 8, 16, 32} <= set(began) and num_steps < 10 * front.resuming._num_tokens
        assert not any(live.num_deaths > live.num_deaths_passed for live in front.table._live.values())

    simulate(test, capacity=1_000)


def test_a_choice_that_nobody_reads_is_parked_in_the_process_where_it_is_resumed() -> None:
    async def test(front: Front) -> None:
        first = front.ask("r")
        front.exit.live["r"].choices[0].is_parked = True
        await front.die(front.a)
        assert front.b.sent == ["r"] and front.exit.posted == [(first, "park")]

    simulate(test)


def test_requests_go_on_elsewhere_when_their_process_is_given_up_for_a_bug() -> None:
    async def test(front: Front) -> None:
        def raise_bug(how: str) -> None:
            raise KeyError("a bug")

        async def never() -> Any:
            raise AssertionError("it is given up")

        front.ask("r")
        given_up: list[Health] = []
        core = SimpleNamespace(index=0, requests=front.a.requests, last_step=0)
        wake = front.resuming.wake
        calls: Any = {"on_orphans": wake, "on_ready": wake, "on_given_up": given_up.append}
        keeper = CoreKeeper(front.env, front.table, cast(Any, core), front.exit, never, raise_bug, **calls)
        keeper.start(cast(Any, SimpleNamespace(pid=1, died=asyncio.sleep(0.1, "signal 9"))))
        front.a.is_serving = False
        await front.env.sleep(1.0)
        assert front.b.sent == ["r"] and [health.state for health in given_up] == ["dead"]
        await keeper.stop()

    simulate(test)


def test_a_request_in_doubt_ends_when_its_engine_leaves_before_that_is_known() -> None:
    async def test(front: Front) -> None:
        async def never() -> Any:
            await asyncio.Future[None]()

        front.table.admit([front.ask("r")])
        front.table.begin_trial("r", 0)
        states = {"is_parting": False, "may_come_back": True, "has_come_back": False}
        core = SimpleNamespace(index=0, requests=front.a.requests, last_step=0, **states)
        wake = front.resuming.wake
        calls: Any = {"on_orphans": wake, "on_ready": wake, "on_given_up": wake}
        keeper = CoreKeeper(front.env, front.table, cast(Any, core), front.exit, never, lambda how: None, **calls)
        front.a.is_serving = False
        keeper.start(cast(Any, SimpleNamespace(pid=1, died=asyncio.sleep(0.1, "a cut"))))
        await front.env.sleep(1.0)
        assert "r" in front.exit.live and front.b.sent == []
        await keeper.stop()
        assert "r" not in front.exit.live and not len(front.table)

    simulate(test)


def test_a_suspect_is_tried_elsewhere_if_its_process_drains_before_it_is_sent() -> None:
    async def test(front: Front) -> None:
        first = front.ask("r")
        front.ask("x")  # fills the other process
        front.table.admit([first])
        await front.die(front.a)
        assert front.table.is_trying(1) and front.b.sent == ["x"]
        front.b.is_draining = True
        front.cores.note_change()
        await front.env.sleep(0.1)
        assert not front.table.num_trials_now and front.table.orphans()[0] == ["r"]
        front.a.requests.pay(1)
        front.a.is_serving = True
        front.resuming.wake()
        await front.env.sleep(0.1)
        assert front.a.sent == ["r", "r"] and front.table.is_trying(0)

    simulate(test, capacity=1)
