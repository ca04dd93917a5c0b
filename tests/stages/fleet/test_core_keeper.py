"""When an engine process of a fleet is started again, in virtual time, with processes that are only said to start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.pipeline import Health
from millrace.runtime.processes.link_channels import OutboundChannel
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.exit.outboxes import Outboxes
from millrace.stages.fleet.core_keeper import HEALTHY_LINK_S, CoreKeeper, RestartPauses, link_pauses
from millrace.stages.fleet.fleet_requests import FleetRequests
from millrace.stages.split import engine_core
from millrace.stages.split.process_keeper import MAX_DEATHS, MAX_STARTS

SICK_S, WELL_S = 0.4, 1.5  # lives: one shorter than is healthy, one longer


class Kept:
    """An engine process with the index 3, and its keeper. Each process lives `life_s`, and serves if `serves`."""

    def __init__(self, env: SimEnv, pauses: RestartPauses | None = None) -> None:
        self.env, self.life_s, self.serves = env, SICK_S, True
        self.start_s = 0.0  # that a start takes
        self.num_failures = 0  # starts to come that fail
        self.starts_s: list[float] = []
        self.deaths_s: list[float] = [0.0]
        self.given_up: list[Health] = []
        requests: Any = OutboundChannel("a", 4)
        states = dict.fromkeys(("is_parting", "may_come_back", "has_come_back"), False)
        self.core = SimpleNamespace(index=3, requests=requests, last_step=0, **states)
        calls: Any = {"on_orphans": lambda: None, "on_ready": lambda: None, "on_given_up": self.given_up.append}
        table, died = FleetRequests(4), self.deaths_s
        self.keeper = CoreKeeper(
            env,
            table,
            cast(Any, self.core),
            Outboxes(),
            self._start,
            lambda how: died.append(env.now()),
            pauses=pauses,
            **calls,
        )
        self.keeper.start(self._live())

    async def _start(self) -> Any:
        self.starts_s.append(self.env.now())
        await self.env.sleep(self.start_s)
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(12, "Cannot allocate memory")
        return self._live()

    def _live(self) -> Any:
        died = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(self.life_s, died.set_result, "signal 9 (SIGKILL)")
        self.core.last_step += self.serves
        return SimpleNamespace(pid=1, died=died)

    @property
    def pauses_s(self) -> list[float]:
        """From each death to the start after it."""
        return [round(start - died, 2) for died, start in zip(self.deaths_s[1:], self.starts_s, strict=False)]


def simulate(test: Callable[[Kept], Awaitable[None]], pauses: RestartPauses | None = None) -> list[dict[str, Any]]:
    """Runs it; returns the log."""

    async def live(env: SimEnv) -> None:
        kept = Kept(env, pauses)
        try:
            await test(kept)
        finally:
            await kept.keeper.stop()

    with captured_logs() as lines:
        run(live, seed=0)
    return lines


def test_a_process_that_serves_and_dies_soon_is_started_after_longer_pauses() -> None:
    async def test(kept: Kept) -> None:
        await kept.env.sleep(100.0)
        assert kept.pauses_s[:9] == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0] and not kept.given_up
        assert kept.keeper.away is not None and kept.keeper.away.state == "loading"
        assert kept.keeper.away.reason is not None and kept.keeper.away.reason.endswith("starts in 30 s")

    lines = simulate(test)
    backed_off = [line for line in lines if line["event"] == "engine_process.backed_off"]
    assert [(line["pause_s"], line["longest_pause_s"]) for line in backed_off] == [(0.5, 30.0)], "once in a row"
    assert {line["engine"] for line in lines if line["event"].startswith("engine_process.")} == {3}


def test_a_life_longer_than_the_start_took_ends_the_row_of_deaths() -> None:
    async def test(kept: Kept) -> None:
        await kept.env.sleep(3 * SICK_S + 0.6)
        kept.life_s = WELL_S
        while len(kept.pauses_s) < 6:
            await kept.env.sleep(0.1)
        assert kept.pauses_s[2:6] == [0.5, 1.0, 0.0, 0.0], "one more short life began before"
        kept.start_s = 2 * WELL_S
        await kept.env.sleep(60.0)
        assert 4.0 in kept.pauses_s, "a start that takes longer than its process lives is no healthy one"

    simulate(test)


def test_a_connection_that_ends_within_seconds_is_made_again_after_longer_pauses() -> None:
    async def test(kept: Kept) -> None:
        kept.life_s = HEALTHY_LINK_S / 2
        await kept.env.sleep(90.0)
        assert kept.pauses_s[:8] == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
        kept.life_s = HEALTHY_LINK_S + 0.1
        await kept.env.sleep(120.0)
        assert 0.0 in kept.pauses_s[8:] and max(kept.pauses_s) == 30.0, "it had served for a while"

    lines = simulate(test, link_pauses())
    assert sum(line["event"] == "engine_process.backed_off" for line in lines) == 1


def test_an_engine_that_was_away_for_a_minute_is_not_taken_for_one_that_flaps() -> None:
    async def test(kept: Kept) -> None:
        kept.start_s = 60.0  # until it can be reached again
        kept.life_s = HEALTHY_LINK_S + 1.0
        await kept.env.sleep(8 * 72.0)
        assert len(kept.pauses_s) > 6 and set(kept.pauses_s) == {0.0}

    simulate(test, link_pauses())


def test_a_start_that_fails_again_for_the_same_reason_is_logged_once() -> None:
    async def test(kept: Kept) -> None:
        kept.num_failures = 3
        await kept.env.sleep(SICK_S + 10.0)
        assert len(kept.starts_s) > 3

    lines = simulate(test)
    assert [line["attempt"] for line in lines if line["event"] == "engine_process.not_started"] == [1]


def test_a_process_that_is_given_up_is_tried_again_every_few_minutes_until_it_lives() -> None:
    async def test(kept: Kept) -> None:
        kept.serves = False
        await kept.env.sleep(30.0)
        assert [health.state for health in kept.given_up] == ["dead"] and len(kept.starts_s) == 1 + MAX_DEATHS
        await kept.env.sleep(1_500.0)
        assert np.diff(kept.starts_s[1 + MAX_DEATHS :]).round().tolist()[:4] == [120.0, 240.0, 300.0, 300.0]
        assert kept.keeper.away is not None and kept.keeper.away.state == "dead"
        kept.life_s = 1e9
        await kept.env.sleep(301.0)
        assert kept.keeper.away is None

    simulate(test)


def test_failed_starts_of_a_process_that_is_given_up_do_not_end_the_tries() -> None:
    async def test(kept: Kept) -> None:
        kept.num_failures = MAX_STARTS + 2
        await kept.env.sleep(40.0)
        assert len(kept.given_up) == 1 and len(kept.starts_s) == MAX_STARTS
        kept.life_s = 1e9
        await kept.env.sleep(60.0 + 120.0)
        assert len(kept.starts_s) == MAX_STARTS + 2 and kept.keeper.away == kept.given_up[0]
        assert len(kept.given_up) == 3, "so that requests which came meanwhile, or waited for it, are ended"
        await kept.env.sleep(240.0)
        assert len(kept.starts_s) == MAX_STARTS + 3 and kept.keeper.away is None

    simulate(test)


def test_pauses_stay_finite_after_any_number_of_deaths() -> None:
    pauses = RestartPauses()

    def death(life_s: float) -> float:
        pauses.note_ready(0.0, 0.0)
        return pauses.note_death(life_s)

    assert pauses.note_death(0.0) == 0.0, "nothing had started"
    assert [death(0.0) for _ in range(2_000)][-1] == 30.0
    assert pauses.note_death(0.0) == 0.0, "it is dead already"
    assert [pauses.next_retry_s() for _ in range(2_000)][-1] == 300.0
    assert death(5.0) == 0.0 and pauses.num_retries == 0, "it lived for five seconds"


def test_an_engine_that_lives_is_not_given_up_however_often_its_connection_ends() -> None:
    async def test(kept: Kept) -> None:
        kept.serves, kept.core.has_come_back = False, True
        await kept.env.sleep(100.0)
        assert not kept.given_up and len(kept.starts_s) > MAX_DEATHS + 1

    simulate(test)


def test_an_engine_has_come_back_only_if_it_is_the_one_that_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        """Of the engine `instance`."""

        pid, instance = 0, "a"
        due: ClassVar[list[Any]] = []  # files that each start had to load

        def __init__(self, *args: Any, **options: Any) -> None:
            """Takes all."""

        async def start(self, setup: Any, files: Any) -> Any:
            Client.due.append(setup.files)
            return SimpleNamespace(instance=Client.instance, files={"a": "b"}, labels={})

        def kill(self) -> None:
            """Does nothing."""

        async def stop(self, timeout_s: float) -> None:
            """Does nothing."""

    async def prepared() -> None:
        pass

    async def fails() -> None:
        raise OSError

    async def live(env: SimEnv) -> None:
        owner: Any = SimpleNamespace(env=env, module="", receive=None, refuse=None, core_lost=None)
        core = engine_core.EngineCore(owner, FleetRequests(1), start_host=cast(Any, prepared))
        await core.start(EngineConfig())
        await core.start_again(EngineConfig(), prepared)
        assert core.has_come_back
        Client.instance = "b"
        with pytest.raises(OSError):
            await core.start_again(EngineConfig(), fails)
        await core.start_again(EngineConfig(), prepared)
        assert not core.has_come_back
        assert Client.due == [None] * 4, "an engine that lives by itself is compared with the others instead"
        Client.instance = ""
        for _ in range(2):
            await core.start_again(EngineConfig(), prepared)
        assert Client.due[4:] == [None, {"a": "b"}]

    monkeypatch.setattr(engine_core, "EngineClient", Client)
    monkeypatch.setattr(engine_core, "digest_of", lambda ready: "")
    run(live, seed=0)
