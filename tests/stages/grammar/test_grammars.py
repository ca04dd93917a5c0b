"""The cache of compiled grammars, and the grammar gate: bounded, shared, held while used."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.stages import SamplingParams, StructuredOutputs
from millrace.stages.errors import Failed, Overloaded, Refused, TimedOut
from millrace.stages.grammar import gate as gate_module
from millrace.stages.grammar.compiled import Grammars
from millrace.stages.grammar.gate import GrammarGate
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.counts import FULL


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def books(**limits: int) -> Grammars:
    def never() -> Any:
        raise AssertionError("nothing is compiled here")

    return Grammars(never, **limits)


TEMPLATE: Any = object()


def test_unused_grammars_are_evicted_least_recently_used_first() -> None:
    grammars = books(max_grammars=2, max_bytes=100)
    a, b, c, d = (regex(name) for name in "abcd")
    assert grammars.add(a, TEMPLATE, 40) and grammars.add(b, TEMPLATE, 40)
    assert grammars.use(a)
    grammars.release(a)
    assert grammars.add(c, TEMPLATE, 40), "b gives way: a was used since"
    assert [grammars.use(one) for one in (a, b, c)] == [True, False, True]
    assert not grammars.add(d, TEMPLATE, 1), "both are in use"
    grammars.release(c)
    assert not grammars.add(d, TEMPLATE, 61), "a holds 40 of 100"
    assert (len(grammars), grammars.num_bytes) == (1, 40)
    assert grammars.add(d, TEMPLATE, 60) and grammars.num_bytes == 100


def test_a_worn_grammar_is_made_anew_and_keeps_its_users() -> None:
    grammars = books(max_grammars=1)
    a = regex("a")
    assert grammars.add(a, TEMPLATE, 10) and grammars.use(a)
    grammars.wear_out(a)
    assert not grammars.use(a)
    assert grammars.add(a, object(), 12) and grammars.use(a)  # type: ignore[arg-type]
    assert (len(grammars), grammars.num_bytes) == (1, 12)
    grammars.release(a)
    assert not grammars.add(regex("b"), TEMPLATE, 1), "one user is left"
    grammars.release(a)
    assert grammars.add(regex("b"), TEMPLATE, 1)


def gated(test: Any, **options: Any) -> None:
    async def main() -> None:
        async with scripted_engine(**options) as engine:
            await test(engine, engine.parts.gate)
            assert engine.parts.gate.num_waiting == 0
            pids = engine.parts.gate.helper_pids
        assert not [pid for pid in pids if psutil.pid_exists(pid)], "helpers end with their engine"

    asyncio.run(asyncio.wait_for(main(), 300.0))


async def ask(engine: Any, form: StructuredOutputs, **options: Any) -> str:
    params = SamplingParams(max_tokens=4, structured_outputs=form)
    outputs = [output async for output in engine.generate("hi", params, output_kind="final", **options)]
    return str(outputs[0].outputs[0].text)


def test_an_engine_without_structured_outputs_has_no_helper() -> None:
    async def test(engine: Any, gate: GrammarGate) -> None:
        assert [output async for output in engine.generate("hi")]
        assert gate.helper_pids == [] and len(engine.parts.grammars) == 0

    gated(test)


@pytest.mark.parametrize(("reply", "num_logged"), [(b'{"error": "is no grammar"}', 0), (b"no JSON", 1)])
def test_a_trial_whose_clients_have_left_fails_without_a_stray_exception(
    reply: bytes, num_logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(gate_module.log, "error", lambda event, **fields: logged.append(event))

    class SlowHelpers:
        async def ask(self, question: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return reply

        async def aclose(self) -> None:
            """Nothing to end."""

    async def main() -> None:
        stray: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: stray.append(context))
        gate, env = GrammarGate(books()), LiveEnv(0)
        gate._helpers = SlowHelpers()  # type: ignore[assignment]
        client = asyncio.ensure_future(gate.admit(env, "a", regex("a")))
        await asyncio.sleep(0.001)
        client.cancel()
        await asyncio.sleep(0.02)
        gc.collect()
        await gate.aclose()
        await env.aclose()
        assert (stray, len(logged)) == ([], num_logged)

    asyncio.run(main())


@pytest.mark.slow
def test_one_trial_serves_all_equal_requests_and_a_bad_grammar_harms_no_other() -> None:
    async def test(engine: Any, gate: GrammarGate) -> None:
        await asyncio.gather(*(ask(engine, regex("[ab]{3}")) for _ in range(20)))
        assert len(engine.parts.grammars) == 1 and len(gate.helper_pids) == 1
        for bad in ("(", "(?=a)b", "^$"):
            with pytest.raises(Refused, match=r"structured_outputs\.regex: ") as refused:
                await ask(engine, regex(bad))
            assert refused.value.param == "structured_outputs" and len(refused.value.message) < 300
        await ask(engine, regex("[ab]{3}"))
        held = [asyncio.ensure_future(ask(engine, regex(f"c{{{i}}}"))) for i in range(1, 4)]
        await asyncio.sleep(0)
        held[0].cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert len(engine.parts.grammars) in (3, 4)
        with pytest.raises(TimedOut):
            await ask(engine, regex("((((a{100}){100}){100}){100})"), timeout_s=0.05)

    gated(test)


@pytest.mark.slow
def test_a_request_waits_for_room_and_too_many_are_refused_as_overloaded() -> None:
    async def test(engine: Any, gate: GrammarGate) -> None:
        env, gate.grammars.max_grammars, gate.max_waiting = LiveEnv(0), 2, 1
        for name in "ab":
            await gate.admit(env, name, regex(name))
        waits = asyncio.ensure_future(gate.admit(env, "c", regex("c")))
        while not gate.num_waiting:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await gate.admit(env, "d", regex("d"))
        await asyncio.wait([waits], timeout=0.3)
        assert not waits.done() and len(gate.grammars) == 2
        gate.leave("a")
        await asyncio.wait_for(waits, 60.0)
        with pytest.raises(Refused, match="in use"):
            await gate.admit(env, "c", regex("c"))
        for name in "bc":
            gate.leave(name)
        await env.aclose()

    gated(test)


@pytest.mark.slow
def test_a_grammar_that_many_asked_for_at_once_is_let_go_when_all_have_ended() -> None:
    async def test(engine: Any, gate: GrammarGate) -> None:
        await asyncio.gather(*(ask(engine, regex("[ab]{3}")) for _ in range(20)))
        gate.grammars.max_grammars = 1
        assert gate.grammars.add(regex("c"), TEMPLATE, 1), "a request still uses it"

    gated(test)


@pytest.mark.slow
def test_of_two_waiting_requests_with_one_id_one_is_refused_and_frees_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: Any, gate: GrammarGate) -> None:
        both, compile_one = threading.Barrier(2), gate.grammars.compile

        def compile_beside_the_other(form: StructuredOutputs) -> Any:
            template = compile_one(form)
            both.wait(60.0)
            return template

        monkeypatch.setattr(gate.grammars, "compile", compile_beside_the_other)
        twins = [gate.admit(engine._env, "twin", regex("[ab]{3}")) for _ in range(2)]
        found = await asyncio.gather(*twins, return_exceptions=True)
        assert sorted(type(each).__name__ for each in found) == ["NoneType", "Refused"]
        gate.leave("twin")
        gate.grammars.max_grammars = 1
        assert gate.grammars.add(regex("c"), TEMPLATE, 1), "a request still uses it"

    gated(test, step_s=0.02)


@pytest.mark.slow
def test_a_helper_that_is_killed_costs_one_request_and_is_back_within_a_second() -> None:

    async def test(engine: Any, gate: GrammarGate) -> None:
        await ask(engine, regex("a"))
        clock = asyncio.get_running_loop().time
        for i in range(50 if FULL else 2):
            (pid,) = gate.helper_pids
            doomed = asyncio.ensure_future(ask(engine, regex(f"((((a{{100}}){{100}}){{100}}){{{100 + i}}})")))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Failed, match="compiles grammars"):
                await doomed
            began_s, used_s = clock(), sum(os.times()[:4])
            await ask(engine, regex(f"b{{{i + 1}}}"))
            assert clock() - began_s < 1.0 or sum(os.times()[:4]) - used_s < 1.0
            assert gate.helper_pids != [pid]

    gated(test)


@pytest.mark.slow
@pytest.mark.security
def test_however_many_schemas_come_few_are_kept_and_none_on_disk(tmp_path: Path) -> None:
    num_schemas = 10_000 if FULL else 161

    async def test(engine: Any, gate: GrammarGate) -> None:
        def schema(i: int) -> StructuredOutputs:
            return StructuredOutputs(
                json={"type": "object", "properties": {f"k{i}": {"maxLength": i, "type": "string"}}}
            )

        await ask(engine, schema(0))
        process = psutil.Process()
        for first in range(1, num_schemas, 20):
            if first == 141:
                rss = process.memory_info().rss
            await asyncio.gather(*(ask(engine, schema(first + i)) for i in range(20)))
            assert len(engine.parts.grammars) <= 128 and engine.parts.grammars.num_bytes <= 64 << 20
        assert len(engine.parts.grammars) == 128
        assert process.memory_info().rss - rss < 64 << 20
        assert list(tmp_path.iterdir()) == []

    os.environ["TMPDIR"], before = str(tmp_path), os.environ.get("TMPDIR")
    try:
        gated(test)
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
