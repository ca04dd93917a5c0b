"""A device that is lost while it serves, with real threads: health says so at once, and each request ends once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages.errors import RequestError
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine
from millrace.stages.testing.scripted.script import Script

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")
LONG = SamplingParams(max_tokens=400)


async def lose(engine: ScriptedEngine, **how: Any) -> tuple[list[BaseException], float]:
    """Loses the device while five requests run: (how each ended, seconds until health said so)."""

    async def ask(prompt: str) -> None:
        async for _ in engine.generate(prompt, LONG):
            pass

    asked = [asyncio.ensure_future(ask(f"prompt {i}")) for i in range(5)]
    streams = engine.model.streams  # type: ignore[attr-defined]
    await asyncio.sleep(0.02)
    streams.lose_after(40, ILLEGAL, **how)
    while not streams.is_lost:  # noqa: ASYNC110 - of another thread
        await asyncio.sleep(0.001)
    began = time.perf_counter()
    while engine.health.is_ready:  # noqa: ASYNC110 - the time is measured
        await asyncio.sleep(0.001)
    took_s = time.perf_counter() - began
    ends = await asyncio.gather(*asked, return_exceptions=True)
    return [end for end in ends if end is not None], took_s


def run(test: Callable[[ScriptedEngine], Any], **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    async def main() -> Any:
        async with scripted_engine(script=Script(eos_probability=0.0), is_async=True, **settings) as engine:
            return await test(engine)

    with captured_logs() as logs:
        return asyncio.run(main()), logs


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("refuses", [False, True])
def test_every_request_of_a_lost_device_ends_with_its_cause(steps_in_flight: int, refuses: bool) -> None:
    async def test(engine: ScriptedEngine) -> Any:
        ends, took_s = await lose(engine, refuses=refuses)
        with pytest.raises(Exception, match="illegal memory access"):
            await engine.submit(None)  # type: ignore[arg-type]
        return ends, took_s, engine.health

    (ends, took_s, health), logs = run(test, steps_in_flight=steps_in_flight)
    assert health.state == "dead" and "illegal memory access" in health.reason
    assert took_s < 60.0
    assert len(ends) == 5 and all(isinstance(end, RequestError) and end.code == "dead" for end in ends)
    events = [record["event"] for record in logs]
    assert events.count("device.lost") == events.count("pipeline.dead") == events.count("stage.crashed") == 1
    assert "step.failed" not in events, "no request is blamed"


@pytest.mark.slow
def test_a_device_that_hangs_after_a_failure_is_lost_within_two_seconds() -> None:
    """A busy machine may take longer once or twice, but not three times."""

    def seconds_until_lost() -> float:
        released = threading.Event()

        async def test(engine: ScriptedEngine) -> Any:
            ends, took_s = await lose(engine, hang=released.wait)
            return ends, took_s, engine.health

        others = set(threading.enumerate())
        try:
            began = time.perf_counter()
            (ends, took_s, health), _ = run(test, steps_in_flight=2)
            assert time.perf_counter() - began < 20.0, "the engine stopped, although threads are blocked"
        finally:
            blocked = set(threading.enumerate()) - others
            released.set()
            for thread in blocked:
                thread.join(60.0)
        assert blocked and not any(thread.is_alive() for thread in blocked), "a thread asks the lost device for ever"
        assert health.state == "dead" and "has not answered for 1.5 s" in health.reason
        assert len(ends) == 5
        return float(took_s)

    assert any(seconds_until_lost() < 2.0 for _ in range(3))


def test_a_step_without_memory_is_tried_again_and_its_kind_is_logged() -> None:
    async def test(engine: ScriptedEngine) -> str:
        line, left = engine.model.line, [1]  # type: ignore[attr-defined]
        submit = line.forward

        def forward(grant: Any, *args: Any, **more: Any) -> Any:
            if left[0] and len(grant.slots):
                left[0] -= 1
                raise MemoryError("out of memory: tried to allocate 2 GiB")
            return submit(grant, *args, **more)

        line.forward = forward
        outputs = [output async for output in engine.generate("a prompt", LONG, output_kind="final")]
        assert len(outputs[-1].outputs[0].token_ids) == 400 and engine.health.is_ready
        return outputs[-1].outputs[0].finish_reason or ""

    finish, logs = run(test)
    (failed,) = [record for record in logs if record["event"] == "step.failed"]
    assert finish == "length" and failed["kind"] == "out_of_memory" and failed["num_rows"] == 1
