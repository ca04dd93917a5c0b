"""The process keeper in virtual time, with engine processes that are only said to start, run and die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.model.errors import CheckpointError
from millrace.runtime.pipeline import NotServing
from millrace.runtime.processes.link_channels import OutboundChannel
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.run import run as simulate
from millrace.stages.errors import Failed, Unavailable
from millrace.stages.exit.outboxes import Outboxes
from millrace.stages.messages import Prompt, Request, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.split import process_keeper, trials
from millrace.stages.split.inflight_requests import GROUP_FROM, InflightRequests
from millrace.stages.split.process_keeper import MAX_DEATHS, MAX_STARTS, ProcessKeeper
from tests.stages.split.test_split import tokens

PARAMS = SamplingParams(max_tokens=1_000, seed=1)


class Front:
    """A front process: the keeper, its requests, and processes that start as `outcomes` say (an error or None)."""

    def __init__(self, env: SimEnv) -> None:
        self.env = env
        self.table = InflightRequests()
        self.exit = Outboxes()
        self.exit.on_end.append(lambda outbox, cause, error: self.table.forget(outbox.request_id))
        self.ran: list[list[str]] = []  # by process: the requests that it got, in order
        self.generated: dict[str, list[int]] = {}  # of the last time that each was sent
        self.requests: OutboundChannel[TokenRequest] = OutboundChannel("a", 256, env.now, on_send=self._sent)
        self.outcomes: list[BaseException | None] = []
        self.starts_s: list[float] = []
        self.clients: list[Any] = []
        self.deadly: set[str] = set()
        self.on_death: Callable[[str], object] = lambda how: None
        self.keeper = ProcessKeeper(
            env, self.table, self.requests, self.exit, self._start, lambda how: self.on_death(how)
        )
        self.keeper.start(self._client())

    def _client(self) -> Any:
        self.ran.append([])
        self.clients.append(SimpleNamespace(pid=1, died=asyncio.get_running_loop().create_future()))
        return self.clients[-1]

    async def _start(self) -> Any:
        self.starts_s.append(self.env.now())
        error = self.outcomes.pop(0) if self.outcomes else None
        if error is not None:
            raise error
        return self._client()

    def _sent(self, prompt: TokenRequest) -> None:
        self.table.sent(prompt)
        if self.clients[-1].died.done() or (self.requests._passes is not None and prompt.generated is None):
            return
        self.ran[-1].append(prompt.request_id)
        if prompt.generated is not None:
            self.generated[prompt.request_id] = prompt.generated[0].tolist()
        asyncio.get_running_loop().call_soon(self._run, prompt)

    def _run(self, prompt: TokenRequest) -> None:
        """The process gives the sequence a slot, and 40 tokens one by one; or dies of it."""
        self.table.admit([prompt.first_sequence_id])
        if prompt.request_id in self.deadly:
            self.kill()
            return
        place = 0 if prompt.generated is None else len(prompt.generated[0])
        self._next(prompt, place, place + 40, self.clients[-1])

    def _next(self, prompt: TokenRequest, place: int, end: int, client: Any) -> None:
        if not client.died.done() and place < end:
            self.table.note(tokens(place, [(prompt.first_sequence_id, place, place)]))
            asyncio.get_running_loop().call_later(0.01, self._next, prompt, place + 1, end, client)

    def kill(self) -> None:
        if not self.clients[-1].died.done():
            self.clients[-1].died.set_result("signal 9 (SIGKILL)")

    async def ask(self, name: str) -> Any:
        """A live request that a process runs."""
        outbox = self.exit.open(Request(name, (Prompt(text="a"),), PARAMS))
        first = outbox.request.first_sequence_id
        await self.requests.send(TokenRequest(name, 0, np.array([1], np.int32), PARAMS, first))
        return outbox


def run(test: Callable[[Front], Awaitable[None]]) -> None:
    async def main(env: SimEnv) -> None:
        front = Front(env)
        try:
            await test(front)
        finally:
            await front.keeper.stop()

    simulate(main, seed=1, policy="fifo")


SHORTAGES = [
    OSError(24, "Too many open files"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    MemoryError(),
    RuntimeError("can't start new thread"),
    KeyError("a bug"),
    NotServing(process_keeper.Health("loading")),
    CheckpointError("/models/a/model.safetensors: is gone"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_whatever_prevents_a_start_is_tried_again_after_a_pause(error: BaseException) -> None:
    async def test(front: Front) -> None:
        await front.ask("a")
        front.outcomes = [error] * 3
        front.kill()
        await front.env.sleep(2.0)
        health = front.keeper.away
        assert health is not None and health.state == "loading" and "/models" not in str(health.reason)
        await front.env.sleep(10.0)
        assert front.keeper.away is None and front.exit.is_live("a") and front.ran[1] == ["a"]
        pauses = np.diff(front.starts_s).round(2).tolist()
        assert pauses == [0.5, 1.0, 2.0]

    run(test)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_after_too_many_failed_starts_every_stream_ends_with_the_cause(error: BaseException) -> None:
    async def test(front: Front) -> None:
        outboxes = [await front.ask(name) for name in "ab"]
        front.outcomes = [error] * MAX_STARTS
        front.kill()
        await front.env.sleep(60.0)
        assert front.keeper.away is not None and front.keeper.away.state == "dead"
        assert not front.exit.live and len(front.starts_s) == MAX_STARTS
        for outbox in outboxes:
            assert isinstance(outbox.error, Unavailable) and outbox.error.code == "dead"
            assert "no engine process could be started in 8 tries" in str(outbox.error)
            assert "/models" not in str(outbox.error)

    run(test)


def test_a_bug_while_a_process_is_replaced_ends_every_stream_and_is_seen() -> None:
    async def test(front: Front) -> None:
        outbox = await front.ask("a")

        def fail(how: str) -> None:
            raise ZeroDivisionError

        front.on_death = fail
        front.kill()
        await front.env.sleep(1.0)
        assert front.keeper.away is not None and front.keeper.away.state == "dead"
        assert isinstance(outbox.error, Unavailable) and "ZeroDivisionError" in str(outbox.error)

    run(test)


def test_processes_that_keep_ending_are_given_up() -> None:
    async def test(front: Front) -> None:
        for _ in range(MAX_DEATHS):
            front.kill()
            await front.env.sleep(1.0)
            assert front.keeper.away is None
        outbox = await front.ask("a")
        front.kill()
        await front.env.sleep(1.0)
        assert front.keeper.away is not None and front.keeper.away.state == "dead"
        assert "engine processes keep ending" in str(outbox.error) and front.keeper.num_deaths == MAX_DEATHS + 1

    run(test)


@pytest.mark.parametrize("place", [0, 11, 24])
def test_a_deadly_request_ends_after_three_deaths_and_its_24_neighbours_go_on(place: int) -> None:
    async def test(front: Front) -> None:
        names = [f"request {number}" for number in range(25)]
        front.deadly = {names[place]}
        outboxes = {}
        for name in names:
            outboxes[name] = await front.ask(name)
        await front.env.sleep(100.0)
        assert front.keeper.away is None and front.keeper.num_deaths == 3
        assert set(front.exit.live) == set(names) - front.deadly
        error = outboxes[names[place]].error
        assert isinstance(error, Failed) and error.code == "engine_died" and error.status == 500
        assert sorted(front.ran[3]) == sorted(front.exit.live)

    run(test)


@pytest.mark.parametrize(("count", "limit_s"), [(40, 4.0), (GROUP_FROM, 4.0)])
def test_many_suspects_that_had_made_tokens_are_cleared_in_few_trials(count: int, limit_s: float) -> None:
    async def test(front: Front) -> None:
        names = [f"request {number}" for number in range(count)]
        for name in names:
            await front.ask(name)
        for _ in range(2):
            await front.env.sleep(0.1)
            front.kill()
        await front.env.sleep(limit_s)
        assert front.keeper.away is None and front.keeper.num_deaths == 2 and not front.table.suspects()
        assert sorted(front.ran[2]) == sorted(names) == sorted(front.exit.live)

    run(test)


def test_of_suspects_that_are_tried_together_the_deadly_one_is_found_and_ends_alone() -> None:
    async def test(front: Front) -> None:
        names = [f"request {number}" for number in range(20)]
        outboxes = {name: await front.ask(name) for name in names}
        for _ in range(2):
            await front.env.sleep(0.1)
            front.kill()
        front.deadly = {names[11]}  # tried in a group of eight: the youngest are tried first
        await front.env.sleep(100.0)
        assert front.keeper.away is None and front.keeper.num_deaths == 4
        assert set(front.exit.live) == set(names) - front.deadly
        error = outboxes[names[11]].error
        assert isinstance(error, Failed) and error.code == "engine_died"

    run(test)


def test_a_request_that_ran_alone_during_two_deaths_is_not_tried_again() -> None:
    async def test(front: Front) -> None:
        outbox = await front.ask("a")
        for _ in range(2):
            await front.env.sleep(0.05)
            front.kill()
        await front.env.sleep(1.0)
        assert front.keeper.away is None and front.ran == [["a"], ["a"], []]
        assert isinstance(outbox.error, Failed) and outbox.error.code == "engine_died"

    run(test)


def test_two_deadly_requests_cost_one_death_each_after_the_first_two() -> None:
    async def test(front: Front) -> None:
        front.deadly = {"b", "d"}
        for name in "abcde":
            await front.ask(name)
        await front.env.sleep(100.0)
        assert set(front.exit.live) == {"a", "c", "e"} and front.keeper.num_deaths == 4
        assert front.ran[2] == ["e", "d"] and front.ran[3][:2] == ["c", "b"], "one suspect more at a time"

    run(test)


def test_answers_go_on_where_they_stopped_also_after_a_trial() -> None:
    async def test(front: Front) -> None:
        for name in "ab":
            await front.ask(name)
        for _ in range(2):
            await front.env.sleep(0.105)
            front.kill()
        await front.env.sleep(1.0)
        assert front.ran == [["a", "b"], ["a", "b"], ["b", "a"]]
        assert front.generated["b"] == list(range(22)), "11 tokens of each of the two processes"
        assert front.keeper.away is None and not front.table.suspects()

    run(test)


def test_a_request_that_has_passed_its_trial_is_not_tried_again_without_a_death() -> None:
    async def test(front: Front) -> None:
        for name in "ab":
            await front.ask(name)
        for _ in range(2):
            await front.env.sleep(0.05)
            front.kill()
        await front.env.sleep(5.0)
        assert front.keeper.away is None and front.table.suspects() == [] and set(front.exit.live) == {"a", "b"}
        front.kill()
        await front.env.sleep(0.001)
        assert front.table.suspects() == ["b", "a"], "a further death makes both suspect, and their trials are longer"

    run(test)


def test_requests_that_come_while_a_process_starts_wait_until_the_suspects_are_tried() -> None:
    async def test(front: Front) -> None:
        for name in "ab":
            await front.ask(name)
        await front.env.sleep(0.05)
        front.kill()
        await front.env.sleep(0.05)
        front.outcomes = [OSError(24, "Too many open files")]
        front.kill()
        await front.env.sleep(0.1)
        await front.ask("late")
        await front.env.sleep(5.0)
        assert front.ran[2] == ["b", "a", "late"] and front.keeper.away is None

    run(test)


def test_a_trial_ends_with_its_request_or_when_nothing_comes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        for name in "ab":
            await front.ask(name)
        for _ in range(2):
            await front.env.sleep(0.05)
            front.kill()
        await front.env.sleep(0.1)
        front.exit.end("b", "cancel")  # is on trial
        monkeypatch.setattr(front, "_next", lambda *_: None)  # a makes no token, as with a long prompt
        await front.env.sleep(trials.TRIAL_S / 2)
        assert front.keeper.away is not None
        await front.env.sleep(trials.TRIAL_S)
        assert front.keeper.away is None and set(front.exit.live) == {"a"}

    run(test)
