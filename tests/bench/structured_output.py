"""What a grammar costs a step: decode steps of a batch with masks and without, in turns, on the same engine.

    python -m tests.bench.structured_output --json results.json

16 answers run together on random weights of a real shape, or with `--shape bundled` on the bundled model, whose step is
ten times shorter; all get a token each step. With a form, all 16 have the same JSON schema,
or each its own. Each pair of runs is one free and one with a form, side by side in time, and its ratio tells the whole
difference: masks, other threads at work, and that JSON of random tokens is dearer to detokenize than the model's own
text. `device_percent` tells the device thread's part alone: what it spends on reading masks, waiting for them included,
on handing tokens over, and more than without on choosing tokens, as a share of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.stages import Engine, EngineConfig, SamplingParams, StructuredOutputs
from tests.bench.shapes import SHAPES, make_checkpoint

BUNDLED = "bundled"


def schema(i: int) -> dict[str, Any]:
    """A record with a name, numbers, a list and an object, as tools and extractions ask for; it has no end."""
    item = {
        "type": "object",
        "properties": {
            f"name{i}": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
        },
        "required": [f"name{i}", "age", "tags", "place"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


class Bench:
    """An engine under measurement."""

    def __init__(self, engine: Engine, batch: int, num_tokens: int) -> None:
        self.engine = engine
        self.batch = batch
        self.num_tokens = num_tokens
        self.spent_s = 0.0  # by the device thread, on masks and choices
        sampler = engine.core.stages.loaded.sampler
        masks = sampler.masks
        for name in ("read", "over", "advance"):
            setattr(masks, name, self._timed(getattr(masks, name)))
        choosing: Any = sampler.choosing
        choosing._choose = self._timed(choosing._choose)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.spent_s += time.perf_counter() - began

        return timed

    async def step_ms(self, forms: list[StructuredOutputs | None], temperature: float) -> float:
        """Milliseconds a step, from the last answer's first token to the first answer's last."""
        times = await asyncio.gather(*(self._one(i, form, temperature) for i, form in enumerate(forms)))
        began, ended = max(first for first, _ in times), min(last for _, last in times)
        return (ended - began) / (self.num_tokens - 1) * 1e3

    async def _one(self, seed: int, form: StructuredOutputs | None, temperature: float) -> tuple[float, float]:
        params = SamplingParams(
            temperature=temperature, max_tokens=self.num_tokens, ignore_eos=True, seed=seed, structured_outputs=form
        )
        first = 0.0
        async for _ in self.engine.generate([5, 6, 7, 8 + seed], params):
            first = first or time.perf_counter()
        return first, time.perf_counter()

    async def compare(self, forms: list[StructuredOutputs], temperature: float, pairs: int) -> dict[str, Any]:
        free: list[StructuredOutputs | None] = [None] * self.batch
        with_form: list[StructuredOutputs | None] = [*forms]
        await self.step_ms(with_form, temperature)  # compiled, and warm
        ratios, plain, guided, shares = [], [], [], []
        for pair in range(pairs):
            order = (free, with_form) if pair % 2 else (with_form, free)
            took, spent = {}, {}
            for which in order:
                self.spent_s = 0.0
                took[id(which)] = await self.step_ms(which, temperature)
                spent[id(which)] = self.spent_s * 1e3 / self.num_tokens
            shares.append((spent[id(with_form)] - spent[id(free)]) / took[id(with_form)])
            plain.append(took[id(free)])
            guided.append(took[id(with_form)])
            ratios.append(took[id(with_form)] / took[id(free)] - 1)
        quarter = statistics.quantiles(ratios, n=4)
        return {
            "step_ms_free": round(statistics.median(plain), 4),
            "step_ms_with_form": round(statistics.median(guided), 4),
            "overhead_percent": round(statistics.median(ratios) * 100, 2),
            "overhead_percent_quartiles": [round(quarter[0] * 100, 2), round(quarter[2] * 100, 2)],
            "device_percent": round(statistics.median(shares) * 100, 2),
            "overhead_percent_of_least": round((min(guided) / min(plain) - 1) * 100, 2),
        }


async def measure(model: str | None, batch: int, num_tokens: int, pairs: int, threads: int | None) -> dict[str, Any]:
    config = EngineConfig(max_num_seqs=batch, max_model_len=num_tokens + 64, threads=threads)
    config = config if model is None else replace(config, model=model)
    async with Engine(config) as engine:
        bench = Bench(engine, batch, num_tokens)
        same = [StructuredOutputs(json=schema(0))] * batch
        own = [StructuredOutputs(json=schema(i)) for i in range(batch)]
        return {
            "one schema, greedy": await bench.compare(same, 0.0, pairs),
            "one schema, temperature 1": await bench.compare(same, 1.0, pairs),
            "a schema each, temperature 1": await bench.compare(own, 1.0, pairs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[BUNDLED, *SHAPES], default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = None if args.shape == BUNDLED else str(make_checkpoint(args.shape, Path(folder)))
        found = asyncio.run(measure(model, args.batch, args.tokens, args.pairs, args.threads))
    about = {name: getattr(args, name) for name in ("shape", "batch", "tokens", "pairs", "threads")}
    told = {"about": about | {"cores": os.cpu_count(), "machine": platform.machine()}, "results": found}
    print(json.dumps(told, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
