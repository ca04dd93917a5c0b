"""A stage is told of the end of each request, once, when it has no item of it in hand any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Outlet, Stage
from tests.runtime.flows import Pass, Word, line


class Remember(Stage[Word, Word]):
    """Keeps the requests that came, until it is told of their end; and what it was told, with what it had in hand."""

    def __init__(self, at_once: int | None = None) -> None:
        self.at_once = at_once
        self.known: set[str] = set()
        self.told: list[tuple[str, str]] = []
        self.in_hand: set[str] = set()
        self.told_too_early: list[str] = []
        self.go_on = asyncio.Event()

    @property
    def concurrency(self) -> int | None:
        return self.at_once

    async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
        names = {item.request_id for item in batch}
        self.in_hand |= names
        try:
            await self.go_on.wait()
        finally:
            self.known |= names  # a stage that was told before this would keep them for ever
            self.in_hand -= names
        for item in batch:
            out.send(item)

    def ended(self, request_id: str, cause: str) -> None:
        if request_id in self.in_hand:
            self.told_too_early.append(request_id)
        self.known.discard(request_id)
        self.told.append((request_id, cause))


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_a_stage_hears_of_each_end_once_and_after_its_last_item(at_once: int | None) -> None:
    @sim_test(seeds=8)
    async def check(env: SimEnv) -> None:
        stage = Remember(at_once)
        async with line(Pass(), stage, env=env) as pipeline:
            asking = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "abcd"]
            await env.sleep(1.0)
            pipeline.cancel("b", "disconnect")
            pipeline.cancel("d", "cancel")
            await env.sleep(1.0)
            stage.go_on.set()
            await asyncio.wait(asking)
            await env.sleep(1.0)
            causes = dict(stage.told)
            assert len(stage.told) == 4 and stage.told_too_early == [] and stage.known == set()
            assert (causes["b"], causes["d"]) == ("disconnect", "cancel") and causes["a"] == causes["c"] != "cancel"

    check()


@sim_test(seeds=4)
async def test_requests_that_never_reached_the_stage_are_told_too(env: SimEnv) -> None:
    class Refuses(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for item in batch:
                out.fail(item, ValueError("no"))

    stage = Remember()
    async with line(Refuses(), stage, env=env) as pipeline:
        with pytest.raises(ValueError, match="no"):
            await pipeline.call(Word("a", "a"))
        assert stage.told == [("a", "error")]


@sim_test(seeds=4)
async def test_a_stop_tells_the_stage_of_what_it_aborts(env: SimEnv) -> None:
    stage = Remember()
    async with line(stage, env=env) as pipeline:
        asking = asyncio.create_task(pipeline.call(Word("a", "a")))
        await env.sleep(1.0)
    await asyncio.wait([asking])
    assert stage.told == [("a", "abort")] and stage.told_too_early == [] and not stage.known


@sim_test(seeds=2)
async def test_a_stage_that_fails_when_it_is_told_disturbs_no_request(env: SimEnv) -> None:
    class Fails(Pass):
        def ended(self, request_id: str, cause: str) -> None:
            raise ZeroDivisionError

    after = Remember()
    after.go_on.set()
    with captured_logs() as events:
        async with line(Fails(), after, env=env) as pipeline:
            assert [await pipeline.call(Word(name, name)) for name in "ab"] == [["a"], ["b"]]
            assert pipeline.health.is_ready and [name for name, _ in after.told] == ["a", "b"]
    assert [event["error"] for event in events if event["event"] == "stage.crashed"] == ["ZeroDivisionError"] * 2
