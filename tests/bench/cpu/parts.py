"""Where a decoding step of ours spends its time, beside what memory allows: `python -m tests.bench.cpu.parts MODEL`.

Endless answers, `batch` of them with `CONTEXT` tokens before each, in an engine as it serves. Linears, attention and
the rest are of the native call, by its own clock; host is what passes between two calls: sampling, and what of the
other stages does not go on beside the call. The floor is the time in which the machine reads the weights once and each
sequence's keys and values, at the mean of the bandwidths that were measured before the prompts and right after the
steps. (Where few rows find their tokens in a copy of the head in int8, they read less of it.) Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.native.model import NativeModel
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.engine.wiring import EngineStages
from tests.bench.throughput import read_bandwidth_gb_s

BATCHES = (1, 8, 16, 32)
CONTEXT = 256  # tokens, when the measured steps begin
NUM_STEPS = 32
NUM_ROUNDS = 3
SETTLE_S = 3.0  # before the bandwidth is read: an idle engine takes memory for its cache, and is done by then


async def measure(model: str, threads: int | None, batches: tuple[int, ...] = BATCHES) -> list[dict[str, float]]:
    """A row a batch: the median of some rounds, by the time of a step. Empty where torch computes the steps."""
    sizes = {"max_model_len": 2048, "max_num_seqs": max(batches)}
    config = EngineConfig(model=model, device="cpu", threads=threads, speculation="off", **sizes)  # type: ignore[arg-type]
    async with Engine(config) as engine:
        if engine.info.attention_backend != "native":
            return []
        rows = []
        for batch in batches:
            rounds = [await look(engine, batch) for _ in range(NUM_ROUNDS)]
            rows.append(sorted(rounds, key=lambda row: row["step_ms"])[NUM_ROUNDS // 2])
        return rows


async def look(engine: Engine, batch: int, num_context: int = CONTEXT) -> dict[str, float]:
    """One row. All answers begin, from prompts of `num_context` tokens that the prefix cache has after the first time;
    then so many steps are looked at. The bandwidth is the mean of one reading before the prompts and one after the
    steps: on a shared machine it changes from minute to minute, and may between the two."""
    await asyncio.sleep(SETTLE_S)
    before = await asyncio.to_thread(read_bandwidth_gb_s)
    draws = [random.Random(place) for place in range(batch)]
    prompts = [[draw.randrange(300, 15_000) for _ in range(num_context)] for draw in draws]
    window = _Window(engine, batch)
    answers = [asyncio.create_task(window.follow(place, ids)) for place, ids in enumerate(prompts)]
    over = asyncio.create_task(window.is_over.wait())
    try:
        first, _ = await asyncio.wait([over, *answers], return_when=asyncio.FIRST_COMPLETED)
        for answer in first - {over}:
            raise RuntimeError("an answer was over before its steps were looked at") from answer.exception()
    finally:
        over.cancel()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    bandwidth = (before + await asyncio.to_thread(read_bandwidth_gb_s)) / 2
    native, block_size = native_of(engine), engine.info.block_size
    begun, ended = window.looks
    spent, num_steps = ended.part_times - begun.part_times, ended.step - begun.step
    parts_ms = (spent[:3] / max(int(spent[3]), 1) / 1e6).tolist()
    step_ms = 1e3 * (ended.time_s - begun.time_s) / num_steps
    num_seen = num_context * batch + (begun.num_answered + ended.num_answered) / 2
    kv_bytes = num_seen / block_size * native.shape.bytes_per_block(block_size, native.dtype)
    floor_ms = (native.weights.num_bytes + kv_bytes) / bandwidth / 1e6
    row = {
        "batch": batch,
        "context": num_seen / batch,
        "step_ms": step_ms,
        **dict(zip(("linears_ms", "attention_ms", "rest_ms"), parts_ms, strict=True)),
        "host_ms": step_ms - sum(parts_ms),
        "weights_floor_ms": native.weights.num_bytes / bandwidth / 1e6,
        "kv_floor_ms": kv_bytes / bandwidth / 1e6,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / step_ms,
        "read_bandwidth_gb_s": bandwidth,
    }
    return {name: round(value, 4) for name, value in row.items()}


@dataclass(frozen=True, slots=True)
class _Look:
    """How far an engine has come at some moment."""

    time_s: float
    step: int
    part_times: NDArray[np.int64]  # of the native steps so far
    num_answered: int  # tokens of all answers


class _Window:
    """Looks at an engine when each answer has begun, and `NUM_STEPS` later; the reader of a token looks."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self.is_over = asyncio.Event()
        self.looks: list[_Look] = []
        self._engine = engine
        self._counts = [0] * batch

    async def follow(self, place: int, ids: list[int]) -> None:
        """Asks, and reads what comes."""
        room = self._engine.info.max_model_len - len(ids)
        params = SamplingParams(temperature=0.0, max_tokens=min(1500, room), ignore_eos=True)
        async for output in self._engine.generate(ids, params):
            self._counts[place] = output.num_generated_tokens
            step = self._engine.core.stages.schedule.scheduler.completed_step
            if not self.looks and min(self._counts) > 2:
                self.looks.append(self._look())
            elif len(self.looks) == 1 and step >= self.looks[0].step + NUM_STEPS:
                self.looks.append(self._look())
                self.is_over.set()

    def _look(self) -> _Look:
        times = native_of(self._engine).time_phases().copy()
        step = self._engine.core.stages.schedule.scheduler.completed_step
        return _Look(time.perf_counter(), step, times, sum(self._counts))


def native_of(engine: Engine) -> NativeModel:
    """What computes the steps of an engine in this process."""
    assert isinstance(engine.core.stages, EngineStages)
    native = engine.core.stages.loaded.runner.decoder.model  # type: ignore[attr-defined]
    assert isinstance(native, NativeModel)
    return native


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.model, options.threads, tuple(options.batches)))))


if __name__ == "__main__":
    main()
