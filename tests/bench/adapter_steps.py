"""How long steps of 32 streams take while adapters are loaded, replaced and unloaded beside them.

    python -m tests.bench.adapter_steps [--shape smollm2-135m] [--backend auto] [--seconds 10]

Most streams are of the base model, four have an adapter each. In the first half nothing else happens. In the second, a
fifth adapter is loaded under a name in use, asked for one token, which takes a device slot, and unloaded, again and
again. Both halves are of the same streams. Steps are those of 32 rows or more; the time between the ends of two is
also told, as a load could delay the host instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from millrace.stages import Engine, SamplingParams
from millrace.stages.messages import StepDone
from millrace.stages.schedule.scheduler import Scheduler
from tests.bench.shapes import SHAPES, make_checkpoint

NUM_STREAMS, NUM_ADAPTERS, RANK = 32, 4, 16
ENDLESS = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def write_adapter(base: Path, folder: Path, seed: int) -> Path:
    """An adapter of rank 16 on all linears of a checkpoint's layers, of random numbers."""
    draws, tensors = np.random.default_rng(seed), {}
    for name, (num_rows, num_columns) in _linears(base):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = draws.standard_normal((RANK, num_columns), np.float32) / num_columns**0.5
        tensors[f"{module}.lora_B.weight"] = draws.standard_normal((num_rows, RANK), np.float32) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _linears(base: Path) -> list[tuple[str, tuple[int, int]]]:
    from safetensors import safe_open

    with safe_open(base / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return [(name, shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]


class StepTimes:
    """The durations of the steps of a scheduler, and the times between their ends, in seconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.steps: list[float] = []
        self.gaps: list[float] = []
        self._last_s = 0.0
        self._on_done = scheduler.on_done
        scheduler.on_done = self._done  # type: ignore[method-assign]

    def _done(self, done: StepDone) -> object:
        now_s = time.perf_counter()
        if len(done.slots) >= NUM_STREAMS:
            self.steps.append(done.took_us / 1e6)
            self.gaps.append(now_s - self._last_s)
        self._last_s = now_s
        return self._on_done(done)

    def take(self) -> tuple[list[float], list[float]]:
        """The times since the last call."""
        taken = self.steps, self.gaps[1:]
        self.steps, self.gaps = [], []
        return taken


async def measure(base: Path, folders: Sequence[Path], backend: str, seconds: float) -> None:
    """Prints a row for each half."""
    modules = tuple(f"a{number}={folder}" for number, folder in enumerate(folders[:NUM_ADAPTERS]))
    engine = Engine(
        model=str(base),
        enable_lora=True,
        lora_modules=modules,
        max_loras=NUM_ADAPTERS + 2,
        max_num_seqs=NUM_STREAMS + 4,
        max_model_len=4096,
        num_gpu_blocks=8192,
        attention_backend=backend,
    )
    async with engine:
        engine.give_way()  # this and the next as a server does
        gc.collect()
        gc.freeze()  # else a collection scans all imported modules in a step: 200 ms where transformers is among them
        times = StepTimes(engine.core.stages.schedule.scheduler)
        names = [f"a{number}" if number < NUM_ADAPTERS else None for number in range(NUM_STREAMS)]
        streams = [asyncio.ensure_future(_drain(engine, name, number)) for number, name in enumerate(names)]
        while engine.status().core.scheduler.num_running < NUM_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(seconds / 5)
        times.take()
        await asyncio.sleep(seconds)
        _tell("nothing else", *times.take(), num_swaps=0)
        swapping = asyncio.ensure_future(_swap(engine, folders[NUM_ADAPTERS:]))
        await asyncio.sleep(seconds)
        taken = times.take()
        swapping.cancel()
        (num_swaps,) = await asyncio.gather(swapping)
        _tell("adapters come and go", *taken, num_swaps=num_swaps)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _drain(engine: Engine, adapter: str | None, number: int) -> None:
    async for _ in engine.generate([5 + number, 6, 7], ENDLESS, adapter=adapter):
        pass


async def _swap(engine: Engine, folders: Sequence[Path]) -> int:
    num_swaps = 0
    try:
        while True:
            await engine.load_adapter("swapped", folders[num_swaps % len(folders)])
            async for _ in engine.generate([9, 10], ONE, adapter="swapped"):
                pass
            num_swaps += 1
            if num_swaps % 4 == 0:
                engine.unload_adapter("swapped")
    except asyncio.CancelledError:
        return num_swaps


def _tell(what: str, steps: list[float], gaps: list[float], num_swaps: int) -> None:
    for name, found in (("step", steps), ("gap", gaps)):
        median, p99, most = (float(np.percentile(found, share)) * 1e3 for share in (50, 99, 100))
        print(
            f"{what:21} {name:5} {len(found):5} steps  {num_swaps:4} swaps  median {median:6.2f} ms  "
            f"p99 {p99 / median:5.2f}x  max {most / median:5.2f}x  above 2x: {sum(f > 2e-3 * median for f in found)}"
        )


def main() -> None:
    """Makes the checkpoint and the adapters, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each half")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        make_checkpoint(options.shape, base)
        folders = [
            write_adapter(base, Path(folder) / f"adapter-{number}", number) for number in range(NUM_ADAPTERS + 2)
        ]
        asyncio.run(measure(base, folders, options.backend, options.seconds))


if __name__ == "__main__":
    main()
