"""Engines with drawn settings, and whether an answer depends on any of them.

    python -m tests.generators.settings --cases 500 [--model FOLDER]

A case draws how numbers are kept, how an engine is to work, and requests that come at once: greedy ones, drawn ones
with seeds, some with a common beginning, some that repeat themselves, some whose client leaves midway. Each has to get
the tokens that an engine with the same numbers on one thread gives it, which computes it whole and alone: whatever is
batched, cut, drafted, found in the cache, swapped out or computed again. On a CPU, by the native library.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from millrace.stages import Engine, SamplingParams
from tests.stages.pressure import swap_if_there_is_room

LENGTH = 256  # of a sequence at most
TIMEOUT_S = 600.0  # for all answers of a case, of a machine with other work too
NUMBERS: dict[str, list[Any]] = {
    "dtype": ["bfloat16", "float32"],
    "quantization": [None, None, "int8", "int4"],
    "kv_cache_dtype": ["auto", "auto", "int8"],
}
SETTINGS: dict[str, list[Any]] = {
    "block_size": [8, 16, 32, 64],
    "threads": [1, 2],
    "max_num_seqs": [2, 8, 64],
    "max_num_batched_tokens": [64, 128, 512],
    "steps_in_flight": [1, 2],
    "speculation": ["auto", "off", "ngram"],
    "enable_prefix_caching": [True, True, False],
    "swap_space": [0.0, 0.25],
    "itl_target_ms": [0.0, 5.0, 50.0],
}
POOLS = [
    LENGTH + 64,
    2 * LENGTH,
    40 * LENGTH,
]  # tokens that have room at once: in the first two, sequences take each other's blocks
ALONE = {"threads": 1, "max_num_seqs": 1, "speculation": "off", "enable_prefix_caching": False, "num_gpu_blocks": 1000}


@dataclass(frozen=True)
class Asked:
    """A request, and after how many tokens its client leaves; 0: it stays."""

    prompt: list[int]
    params: SamplingParams
    leaves_after: int = 0


@dataclass(frozen=True)
class Case:
    """What was drawn."""

    numbers: dict[str, Any]
    settings: dict[str, Any]
    requests: list[Asked]

    @classmethod
    def of(cls, draw: random.Random) -> Case:
        """The next one."""
        numbers, settings = _one_of_each(draw, NUMBERS), _one_of_each(draw, SETTINGS)
        common = _ids(draw, draw.choice([0, 16, 33, 70]))
        settings["num_gpu_blocks"] = draw.choice(POOLS) // settings["block_size"]
        requests = [_request(draw, common) for _ in range(draw.choice([1, 5, 20, 34]))]
        return cls(numbers, settings, requests)


def _one_of_each(draw: random.Random, known: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in known.items()}


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 400) for _ in range(count)]


def _request(draw: random.Random, common: list[int]) -> Asked:
    prompt = draw.choice([[], common]) + _ids(draw, draw.randint(1, 90))
    if draw.random() < 0.2:
        prompt = prompt[:3] * 20
    longest = draw.choice([40, 120])  # sequences that grow by the latter take each other's blocks
    max_tokens = draw.randint(1, min(LENGTH - len(prompt), longest))
    how: dict[str, Any] = draw.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "logprobs": 3},
        ]
    )
    params = SamplingParams(max_tokens=max_tokens, seed=draw.randrange(1000), ignore_eos=True, **how)
    return Asked(prompt, params, draw.randint(1, max_tokens) if draw.random() < 0.15 else 0)


async def _answer(engine: Engine, asked: Asked) -> list[int]:
    """Its tokens, until the client leaves."""
    tokens: list[int] = []
    async with aclosing(engine.generate(asked.prompt, asked.params)) as outputs:
        async for output in outputs:
            for choice in output.outputs:
                tokens += choice.token_ids
            if asked.leaves_after and len(tokens) >= asked.leaves_after:
                break
    return tokens[: asked.leaves_after] if asked.leaves_after else tokens


class Engines:
    """Engines of one model, and in what ways blocks were taken from sequences of those with drawn settings."""

    def __init__(self, model: str | None, always_swaps: bool) -> None:
        self.model, self.always_swaps = model, always_swaps
        self.num_taken: Counter[str] = Counter()

    async def answer_each(self, numbers: dict[str, Any], requests: list[Asked]) -> list[list[int]]:
        """By one with these numbers, one after the other."""
        async with self._engine(numbers | ALONE) as engine:
            async with asyncio.timeout(TIMEOUT_S):
                return [await _answer(engine, asked) for asked in requests]

    async def answer_all(self, settings: dict[str, Any], requests: list[Asked]) -> list[list[int]]:
        """By one with these settings, at once."""
        async with self._engine(settings) as engine:
            if self.always_swaps:
                swap_if_there_is_room(engine)
            async with asyncio.timeout(TIMEOUT_S):
                answers = await asyncio.gather(*(_answer(engine, asked) for asked in requests))
            schedule: Any = engine.pipeline.stages["schedule"]
            for (how, _), number in schedule.scheduler.preemptions.items():
                self.num_taken[how] += number
            return answers

    def _engine(self, settings: dict[str, Any]) -> Engine:
        return Engine(model=self.model, device="cpu", max_model_len=LENGTH, **settings)


def run(cases: int, seed: int, model: str | None = None, always_swaps: bool = False) -> Counter[str]:
    """How often blocks were swapped out, and given up to be computed again. Raises AssertionError for the first case
    whose answers are not those of requests alone, with what was drawn. With `always_swaps` an engine swaps wherever
    there is room, whatever it has measured."""
    engines = Engines(model, always_swaps)
    for number in range(cases):
        case = Case.of(random.Random(seed * 1_000_003 + number))
        told = f"seed {seed}, case {number}, {case.numbers}, {case.settings}"
        try:
            wanted = asyncio.run(engines.answer_each(case.numbers, case.requests))
            found = asyncio.run(engines.answer_all(case.numbers | case.settings, case.requests))
        except Exception as error:
            raise AssertionError(f"{told}: {error!r}") from error
        other = [place for place, tokens in enumerate(found) if tokens != wanted[place]]
        if other:
            raise AssertionError(f"{told}: answers {other} are others; the first to {case.requests[other[0]]}")
    return engines.num_taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--model", help="a folder; none: the bundled model")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    taken = dict(run(options.cases, options.seed, options.model))
    print(f"{options.cases} engines with drawn settings: each request has the tokens that it has alone")
    print(f"blocks were taken: {taken}")


if __name__ == "__main__":
    main()
