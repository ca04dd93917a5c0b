"""A split engine over two or three ranks: one that is killed or stopped costs the group and no answer."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.stages.split.split_engine import SplitEngine
from tests.stages.split.test_split_engine import CONFIG, answer, until

pytestmark = pytest.mark.slow
TORCH = replace(CONFIG, attention_backend="torch", device="cpu", dtype="float32", threads=2)
GONE_S = 10.0
IS_FULL = os.environ.get("MILLRACE_FULL") == "1"


def ranks_of(engine: SplitEngine) -> list[int]:
    """The processes that the engine process has started."""
    return sorted(pid for pid in children(engine.engine_pid) if b"backends.torch.rank" in _read(pid, "cmdline"))


def children(pid: int | None) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def is_gone(pid: int) -> bool:
    return b"State:\tZ" in _read(pid, "status") or not _read(pid, "status")


@pytest.mark.skipif(not IS_FULL, reason="starts torch in eleven processes and more; set MILLRACE_FULL=1")
@pytest.mark.parametrize(
    ("sizes", "victim"),  # of the other ranks; the second of a pipeline of three has the layers in the middle
    [
        ({"tensor_parallel_size": 2}, 0),
        ({"pipeline_parallel_size": 2}, 0),
        ({"pipeline_parallel_size": 3}, 1),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 2),
    ],
)
def test_a_rank_that_is_killed_or_stopped_costs_its_group_and_no_answer(sizes: dict[str, int], victim: int) -> None:
    prompts = [f"{word} and" for word in ("Zoe", "Tom", "A cat")]

    async def strike(engine: SplitEngine, number: int, due: list[str]) -> float:
        """Strikes the rank in mid-answer. Returns the seconds until its group was gone."""
        core, ranks = engine.engine_pid, ranks_of(engine)
        assert core is not None and len(ranks) == num_others
        struck_s: list[float] = []

        def hit() -> None:
            if not struck_s:
                struck_s.append(time.monotonic())
                os.kill(ranks[victim], number)

        under_way = [asyncio.ensure_future(answer(engine, prompt, hit)) for prompt in prompts]
        await until(lambda: bool(struck_s))
        await until(lambda: is_gone(core) and all(map(is_gone, ranks)))
        took_s = time.monotonic() - struck_s[0]
        assert await asyncio.gather(*under_way) == due
        await until(lambda: engine.health.is_ready)
        return took_s

    num_others = math.prod(sizes.values()) - 1
    before = set(Path(tempfile.gettempdir()).glob("millrace-ranks-*"))

    async def main() -> None:
        async with SplitEngine(replace(TORCH, **sizes)) as engine:
            due = [await answer(engine, prompt) for prompt in prompts]
            for deaths, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
                took_s = await strike(engine, number, due)
                print(f"{signal.Signals(number).name}: gone in {took_s:.2f} s")
                assert took_s < GONE_S and engine.num_deaths == deaths
            idle_core, idle_ranks = engine.engine_pid, ranks_of(engine)
            os.kill(idle_ranks[victim], signal.SIGKILL)
            await until(lambda: engine.engine_pid not in (None, idle_core) and engine.health.is_ready)
            core, ranks = engine.engine_pid, ranks_of(engine)
            assert core is not None and len(ranks) == num_others
            os.kill(ranks[victim], signal.SIGSTOP)  # it cannot end by itself
            os.kill(core, signal.SIGKILL)
            killed_s = time.monotonic()
            await until(lambda: all(map(is_gone, ranks)))
            assert time.monotonic() - killed_s < GONE_S
            await until(lambda: engine.num_deaths == 4 and engine.health.is_ready)
            assert await answer(engine, prompts[0]) == due[0]
            last = ranks_of(engine)
        await until(lambda: all(map(is_gone, last)))
        assert set(Path(tempfile.gettempdir()).glob("millrace-ranks-*")) <= before

    asyncio.run(asyncio.wait_for(main(), 400.0))
