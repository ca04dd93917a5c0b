"""The encode stage on a device that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import JobHangs
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.run import run as simulate
from millrace.stages.device.device_guard import DeviceLost
from millrace.stages.encode.stage import Encode
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams


class Failing:
    """An encoder on a device that fails."""

    num_calls = 0

    def encode(self, batch: Sequence[TokenRequest]) -> Any:
        self.num_calls += 1
        raise RuntimeError("CUDA error: device-side assert triggered")


def prompt(number: int) -> TokenRequest:
    return TokenRequest(f"r{number}", 0, np.array([1], np.int32), SamplingParams(), number)


def encode(probe: Any) -> tuple[int, list[str]]:
    """(batches run, requests that failed one by one) of four prompts."""
    failed: list[str] = []
    runner = Failing()

    async def main() -> None:
        env = LiveEnv(0)
        stage = Encode(runner, 64, 8, probe)
        lane = SimpleNamespace(take=dict)
        out: Any = SimpleNamespace(fail=lambda request, _: failed.append(request.request_id), flush=_nothing)
        try:
            await stage.setup(SimpleNamespace(env=env, lane=lane, is_live=lambda _: True))  # type: ignore[arg-type]
            await stage.handle([prompt(i) for i in range(4)], out)
        finally:
            await env.aclose()

    with captured_logs():
        asyncio.run(main())
    return runner.num_calls, failed


async def _nothing() -> None:
    pass


def test_a_lost_device_ends_the_encode_stage_and_blames_no_prompt() -> None:
    def probe() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceLost, match="device-side assert triggered.*CUDA_LAUNCH_BLOCKING"):
        encode(probe)


def test_a_device_that_answers_runs_each_prompt_of_a_failed_batch_alone() -> None:
    assert encode(lambda: None) == (5, ["r0", "r1", "r2", "r3"])


def test_a_batch_that_hangs_ends_the_encode_stage_in_time() -> None:
    async def main(env: SimEnv) -> float:
        def hang(_: object = None) -> None:
            raise JobHangs

        stage = Encode(SimpleNamespace(encode=hang), 64, 8, hang)  # type: ignore[arg-type]
        lane, out = SimpleNamespace(take=dict), SimpleNamespace(flush=_nothing)
        await stage.setup(SimpleNamespace(env=env, lane=lane, is_live=lambda _: True))  # type: ignore[arg-type]
        began_s = env.now()
        with pytest.raises(DeviceLost, match="since step 0 .it has not answered"):
            await stage.handle([prompt(0), prompt(1)], out)  # type: ignore[arg-type]
        await env.aclose()
        return env.now() - began_s

    with captured_logs():
        assert simulate(main, seed=1, policy="fifo").value <= 2.0
