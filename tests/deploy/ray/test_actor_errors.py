"""What is said of an actor that does not start. Without Ray: its errors are of the same shape here."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.deploy.ray.ray_executor import RayExecutor, how_it_ended
from millrace.runtime.env.env import LiveEnv
from millrace.stages.config import EngineConfig
from millrace.stages.split.process_client import EngineDied


class RayError(Exception):
    """As `ray.exceptions.RayError`: its text begins with the method's name, and a stack follows."""

    def __init__(self, cause: BaseException | None, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class LateError(RayError, TimeoutError):
    """As Ray makes it of an actor's own TimeoutError."""


STACK = "ray::EngineActor.join() (pid=7, ip=10.0.0.2)\n  File ...\nTimeoutError: no answer of 10.0.0.1:4711"


def executor() -> Any:
    made: Any = RayExecutor(EngineConfig(executor="ray", ray_timeout_s=0.01), LiveEnv())
    made._ray, made._host = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError)), "10.0.0.1"
    return made


def said_of(future: Future[int]) -> str:
    with pytest.raises(EngineDied) as raised:
        asyncio.run(executor()._joined(SimpleNamespace(future=lambda: future), 3))
    return str(raised.value)


def test_an_actor_that_cannot_reach_the_server_is_no_lack_of_room():
    future: Future[int] = Future()
    future.set_exception(LateError(TimeoutError("no answer of 10.0.0.1:4711"), STACK))
    said = said_of(future)
    assert said.startswith("the actor of engine 3 did not start: TimeoutError: no answer of 10.0.0.1:4711; its node")
    assert "must reach this one at 10.0.0.1" in said and "ray status" not in said


def test_an_actor_that_ray_does_not_start_is_said_to_want_room():
    assert "`ray status` shows what is free" in said_of(Future())


def test_an_error_of_an_actor_is_told_by_its_cause():
    assert how_it_ended(RayError(ValueError("the key is wrong"), STACK)) == "ValueError: the key is wrong"
    assert how_it_ended(RayError(None, "\nThe actor died.\nmore")) == "RayError: The actor died."


def test_a_cluster_that_starts_here_reports_no_usage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    seen: list[str | None] = []
    ray = SimpleNamespace(init=lambda address: seen.append(os.environ.get("RAY_USAGE_STATS_ENABLED")))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    executor()._connect(ray)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    executor()._connect(ray)
    assert seen == ["1", "0"]
