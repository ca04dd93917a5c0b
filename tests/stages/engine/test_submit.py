"""Submitting to an engine: a refused request gets the reason, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.stages import SamplingParams, StructuredOutputs
from millrace.stages.errors import Overloaded, Refused, TimedOut
from millrace.stages.messages import Prompt, Request
from millrace.stages.request_limits import as_token_ids
from tests.stages.grammar.test_grammars import TEMPLATE, ask, gated, regex

pytestmark = pytest.mark.slow

FORM = regex("[ab]{3}")


def request(name: str, form: StructuredOutputs | None = None) -> Request:
    params = SamplingParams(max_tokens=4, structured_outputs=form)
    return Request(name, (Prompt(token_ids=as_token_ids([70, 71])),), params)


async def fill(engine: Any) -> list[Any]:
    """Submits as many requests as the entry channel holds, while no stage takes any."""
    outboxes: list[Any] = []
    with pytest.raises(Overloaded, match=r"requests wait to be processed: try again in 1 s") as full:
        while len(outboxes) < 10_000:
            outboxes.append(await engine.submit(request(f"f{len(outboxes)}"), wait=False))
    assert full.value.estimated_wait_s == 1.0
    return outboxes


async def read(outboxes: list[Any]) -> None:
    for outbox in outboxes:
        assert [delta async for deltas in outbox for delta in deltas][-1].finish_reason is not None


@pytest.mark.parametrize("reason", ["full", "id in use"])
def test_a_request_that_is_turned_away_lets_go_of_its_grammar(reason: str) -> None:
    async def test(engine: Any, gate: Any) -> None:
        await ask(engine, FORM)  # from now on the grammar is compiled, and requests with it need not wait
        others = await fill(engine) if reason == "full" else [await engine.submit(request("same"))]
        with pytest.raises(Overloaded if reason == "full" else Refused):
            await engine.submit(request("same", FORM), wait=False)
        gate.grammars.max_grammars = 1
        assert gate.grammars.add(regex("c"), TEMPLATE, 1), "a request still uses it"
        await read(others)
        await engine.check_quiet()

    gated(test)


def test_a_full_engine_admits_later_requests() -> None:
    async def test(engine: Any, gate: Any) -> None:
        waiting = asyncio.ensure_future(read(await fill(engine)))
        assert await ask(engine, FORM)
        await waiting
        await engine.check_quiet()

    gated(test)


@pytest.mark.parametrize("end", ["abort", "deadline", "cancel"])
def test_a_request_that_waits_at_a_gate_is_live_and_ends_there(end: str) -> None:
    async def test(engine: Any, gate: Any) -> None:
        at_gate = asyncio.Event()

        async def never(*args: Any) -> None:
            at_gate.set()
            await asyncio.Event().wait()

        gate.admit = never
        deadline_s = 2.0 if end == "deadline" else 9.0
        waiting = asyncio.ensure_future(engine.submit(request("same", FORM), deadline_s=deadline_s))
        await at_gate.wait()
        assert "same" in engine.exit.live, "a drain waits for it"
        if end == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif end == "abort":
            assert engine.abort("same")
            deltas = [delta async for deltas in await waiting for delta in deltas]
            assert all(delta.finish_reason != "stop" for delta in deltas) and not engine.abort("same")
        else:
            with pytest.raises(TimedOut):
                [deltas async for deltas in await waiting]
        del gate.admit
        await engine.check_quiet()

    gated(test)
