"""Freezes each stage and each edge in turn under load: `/health/ready` names it in time.

CI freezes a few; MILLRACE_FULL=1 freezes all, and each by `--inject` too. `tests/runtime/health/test_stalls.py` covers
all of them in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.pipeline import Pipeline
from tests.counts import FULL
from tests.deploy.server.test_health import Client, eventually, served
from tests.runtime.health.test_stalls import EDGES, STAGES, freeze_edge, freeze_stage

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
STAGES_HERE = STAGES if FULL else ("schedule",)
EDGES_HERE = EDGES if FULL else ("tokenize.out->schedule.in", "sample.feedback->schedule.feedback")
INJECTED = tuple(name for name in STAGES if name != "exit") if FULL else ("tokenize",)


async def named(client: Client, freeze: Callable[[Pipeline], None], num_before: int = 3) -> tuple[str, str, float]:
    """Freezes a server under load. Returns the state and stage of `/health/ready` and the delay after the freeze."""
    ask: Callable[[int], Any] = lambda i: client.post({"prompt": "a" * (3 + i), "max_tokens": 400}, f"r{i}")  # noqa: E731
    asking = [asyncio.ensure_future(ask(i)) for i in range(num_before)]
    if num_before:
        await asyncio.sleep(0.3)
        assert (await client.get("/health/ready"))[0] == 200
    loop = asyncio.get_running_loop()
    freeze(client.engine.pipeline)
    began_s = loop.time()
    asking += [asyncio.ensure_future(ask(10 + i)) for i in range(3)]
    _, health = await eventually(lambda: client.get("/health/ready"), lambda answer: answer[0] == 503)
    took_s = loop.time() - began_s
    for one in asking:
        one.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*asking)
    return health["status"], health["stage"], took_s


def check(name: str, freeze: Callable[[Pipeline], None], inject: tuple[str, ...] = ()) -> None:
    """A busy machine may take a second more once or twice, but not three times."""

    async def run() -> float:
        async with served({"stall_timeout_s": TIMEOUT_S}, step_s=0.005, inject=inject) as client:
            status, stage, took_s = await named(client, freeze, 0 if inject else 3)
            assert (status, stage) == ("stalled", name) and took_s >= TIMEOUT_S
            return took_s

    with captured_logs():
        assert any(asyncio.run(run()) < 2 * TIMEOUT_S for _ in range(3))


@pytest.mark.parametrize("name", STAGES_HERE)
def test_a_stage_that_freezes_under_load_is_named_within_twice_the_threshold(name: str):
    check(name, freeze_stage(name))


@pytest.mark.parametrize("name", EDGES_HERE)
def test_an_edge_that_freezes_under_load_is_named_within_twice_the_threshold(name: str):
    check(name, freeze_edge(name))


@pytest.mark.parametrize("name", INJECTED)
def test_a_stage_that_is_frozen_by_inject_is_named_within_twice_the_threshold(name: str):
    check(name, lambda pipeline: None, (f"stage={name},freeze",))
