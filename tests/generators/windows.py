"""Engines whose windows free memory, against one whose layers all keep all keys.

    python -m tests.generators.windows --cases 300

A case draws a tiny model of Gemma 3 or gpt-oss, the window of each of its layers, settings that make memory scarce, and
requests: some alike, some with log-probabilities of their prompt, with several choices, with priorities; some whose
client leaves, in the middle of the prompt too, and that come again. On the way the prefix cache is emptied, steps fail,
and allocate crashes. Each request has to get the tokens and the log-probabilities that it gets from an engine
that frees nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.native_decoder import NativeDecoder
from millrace.model.spec import AttentionSpec, DecoderSpec
from millrace.stages import Engine, SamplingParams
from millrace.stages.loading import early
from tests.families.checkpoint import VOCAB_SIZE, make_model, write
from tests.families.zoo import chosen

LENGTH = 160  # of a sequence at most
TIMEOUT_S = 240.0  # for all answers of a case
TIE = 2e-3  # of log-probabilities, within which another order of sums may choose another token
TOLERANCE = 2e-3  # of log-probabilities, by another order of sums in float32
ROWS = ("gemma3", "gpt-oss")
SETTINGS: dict[str, list[Any]] = {
    "block_size": [1, 8, 16, 32],
    "max_num_seqs": [2, 4, 8],
    "max_num_batched_tokens": [16, 48, 256],
    "steps_in_flight": [1, 2, 2],
    "speculation": ["off", "ngram", "ngram"],
    "enable_prefix_caching": [True, True, False],
    "num_cpu_blocks": [0, 8, 40],
    "scheduler": ["priority", "fifo"],
    "enable_chunked_prefill": [True, True, True, False],
    "threads": [1, 2],
}
WINDOWS = (1, 3, 16, 21, 40, 64)
UNIFORM: dict[str, Any] = {  # of an engine whose layers all keep all keys
    "threads": 1,
    "block_size": 16,
    "num_gpu_blocks": 16 * LENGTH // 16,
    "max_num_seqs": 16,
    "speculation": "off",
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class Asked:
    """A request, the one after which it comes, and when its client leaves."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    after: int | None = None
    leaves_after_s: float | None = None


@dataclass(frozen=True)
class Case:
    """What was drawn."""

    row: str
    backend: str
    windows: tuple[int | None, ...]  # of each layer
    settings: dict[str, Any]
    requests: list[Asked]
    num_resets: int
    num_crashes: int
    num_voids: int

    @classmethod
    def of(cls, draw: random.Random, backends: Sequence[str] = ("native", "torch")) -> Case:
        """The next one."""
        small, other = draw.choice(WINDOWS), draw.choice((*WINDOWS, LENGTH, 4 * LENGTH))
        windows = [None, small, *draw.choices((None, small, other), k=2)]
        if draw.random() < 0.2:
            windows = [small, small, *draw.choices((small, other), k=2)]
        draw.shuffle(windows)
        settings = {name: draw.choice(values) for name, values in SETTINGS.items()}
        if not settings["enable_chunked_prefill"]:
            settings["max_num_batched_tokens"] = 256
        settings["num_gpu_blocks"] = int(draw.choice((1.05, 1.5, 2.5, 20)) * LENGTH) // settings["block_size"] + 2
        common = [draw.randrange(8, VOCAB_SIZE) for _ in range(draw.choice((0, 16, 33, 64, 97)))]
        requests: list[Asked] = []
        for _ in range(draw.choice((3, 8, 14))):
            requests.append(_request(draw, common, requests))
        return cls(
            draw.choice(ROWS),
            draw.choice(backends),
            tuple(windows),
            settings,
            requests,
            num_resets=draw.choice((0, 0, 0, 1, 3)),
            num_crashes=draw.choice((0, 0, 0, 1, 2)),
            num_voids=draw.choice((0, 0, 0, 1)),
        )


def _request(draw: random.Random, common: list[int], before: Sequence[Asked]) -> Asked:
    after = draw.randrange(len(before)) if before and draw.random() < 0.5 else None
    if after is not None and draw.random() < 0.5:
        prompt = before[after].prompt
    else:
        prompt = draw.choice(([], common, common)) + [draw.randrange(8, VOCAB_SIZE) for _ in range(draw.randint(1, 50))]
        if draw.random() < 0.3:
            prompt = (prompt[:5] * 40)[: draw.randint(1, 120)]
    params = SamplingParams(
        max_tokens=draw.randint(1, min(60, LENGTH - len(prompt))),
        n=draw.choice((1, 1, 1, 2)),
        temperature=0.0,
        ignore_eos=True,
        logprobs=draw.choice((None, 2)),
        prompt_logprobs=draw.choice((None, None, None, 0)),
    )
    leaves = draw.random() * 0.02 if draw.random() < 0.2 else None
    return Asked(prompt, params, draw.randint(0, 2), after, leaves)


@dataclass
class Answer:
    """The choices of a request, as far as its client stayed, with log-probabilities; those of its prompt."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    gaps: list[list[float]]  # of the best log-probability to the second
    prompt: list[float]


async def _answer(engine: Engine, asked: Asked, request_id: str) -> Answer:
    number = asked.params.n
    answer = Answer(*([[] for _ in range(number)] for _ in range(3)), [])
    stream = engine.generate(asked.prompt, asked.params, request_id=request_id, priority=asked.priority)
    async with aclosing(stream) as outputs:
        async for output in outputs:
            if output.prompt_logprobs is not None:
                answer.prompt = output.prompt_logprobs.logprobs.tolist()
            for choice in output.outputs:
                answer.tokens[choice.index] += choice.token_ids
                for each in choice.logprobs or ():
                    answer.logprobs[choice.index].append(each.logprob)
                    answer.gaps[choice.index].append(each.top[0][3] - each.top[1][3])
    return answer


async def _answer_all(engine: Engine, case: Case, draw: random.Random) -> list[Answer | None]:
    """The answers to all requests of a case, in their order of coming; None: its client has left."""
    ends = [asyncio.Event() for _ in case.requests]

    async def ask(place: int, asked: Asked) -> Answer | None:
        if asked.after is not None:
            await ends[asked.after].wait()
        try:
            async with asyncio.timeout(asked.leaves_after_s):
                return await _answer(engine, asked, f"request-{place}")
        except TimeoutError:
            return None
        finally:
            ends[place].set()

    async def reset() -> None:
        for _ in range(case.num_resets):
            await asyncio.sleep(draw.random() * 0.05)
            await engine.forget_prefixes()

    resetting = asyncio.create_task(reset())
    answers = await asyncio.gather(*(ask(place, asked) for place, asked in enumerate(case.requests)))
    await resetting
    return list(answers)


async def _at_rest(allocator: Any) -> None:
    """Waits until no block is in use."""
    for _ in iter(lambda: any(each.pool.num_in_use or each.pool.num_quarantined for each in allocator.kinds), False):
        await asyncio.sleep(0.01)


def _plant(engine: Engine, case: Case, draw: random.Random) -> None:
    """Steps that fail once they have written, and crashes of allocate in the middle of a plan."""
    stages: Any = engine.pipeline.stages
    device, allocator = stages["execute"].device, stages["allocate"].allocator
    allocator._windows.many_rows = draw.choice([1, 32])  # from which on rows go on in blocks they passed
    run_forward, fails = device._run_forward, _at(draw, case.num_voids, 25)

    def failing(grant: Any, forward: Callable[[Any], Any]) -> Any:
        def forward_and_fail(grant: Any) -> Any:
            result = forward(grant)
            if next(fails):
                raise ArithmeticError("a planted failure of a step")
            return result

        return run_forward(grant, forward_and_fail)

    device._run_forward = failing
    victim = draw.choice([*(each.pool for each in allocator._device.kinds), allocator._windows])
    name = "retire" if victim is allocator._windows else "take_behind"
    method, crashes = getattr(victim, name), _at(draw, case.num_crashes, 10)

    def crashing(*args: Any) -> Any:
        result = method(*args)
        if next(crashes):
            raise ArithmeticError("a planted crash of allocate")
        return result

    setattr(victim, name, crashing)


def _at(draw: random.Random, count: int, spacing: int) -> Iterator[bool]:
    """True at `count` random calls."""
    for _ in range(count):
        for _ in range(draw.randint(2, spacing)):
            yield False
        yield True
    while True:
        yield False


def difference(found: Answer, wanted: Answer) -> str:
    """How an answer differs from what it should be; "" if it does not, up to ties."""
    if len(found.prompt) != len(wanted.prompt):
        return f"{len(found.prompt)} log-probabilities of the prompt instead of {len(wanted.prompt)}"
    for place, (one, other) in enumerate(zip(found.prompt, wanted.prompt, strict=True), 1):
        if abs(one - other) > TOLERANCE:
            return f"prompt token {place} has log-probability {one:.4f} instead of {other:.4f}"
    for choice, (tokens, expected) in enumerate(zip(found.tokens, wanted.tokens, strict=True)):
        if len(tokens) != len(expected):
            return f"choice {choice} has {len(tokens)} tokens instead of {len(expected)}"
        for place, (one, other) in enumerate(zip(tokens, expected, strict=True)):
            if one != other and wanted.gaps[choice][place] < TIE:
                break
            if one != other:
                gap = wanted.gaps[choice][place]
                return f"choice {choice} token {place}: {one} instead of {other}, {gap:.3f} likelier"
            if found.logprobs[choice]:
                logprob, right = found.logprobs[choice][place], wanted.logprobs[choice][place]
                if abs(logprob - right) > TOLERANCE:
                    return f"choice {choice} token {place}: log-probability {logprob:.4f} instead of {right:.4f}"
    return ""


class Windows:
    """Engines of both models, and what happened in those whose windows free memory."""

    def __init__(self, root: Path) -> None:
        self.folders = {
            row.name: write(row, make_model(row), root / row.name) for row in chosen(ROWS) if row.name in ROWS
        }
        self.seen: Counter[str] = Counter()

    def run(self, case: Case, seed: int) -> list[str]:
        """What is wrong with the answers of a case."""
        with windows_of(case.windows):
            with patch.object(NativeDecoder, "runs_kinds", False), patch.object(Decoder, "runs_kinds", False):
                wanted = asyncio.run(self._wanted(case))
            found = asyncio.run(self._found(case, random.Random(seed)))
        pairs = enumerate(zip(found, wanted, strict=True))
        texts = ((place, "" if one is None else difference(one, other)) for place, (one, other) in pairs)
        return [f"request {place}: {text}; {case.requests[place]}" for place, text in texts if text]

    async def _wanted(self, case: Case) -> list[Answer]:
        async with self._engine(case, UNIFORM) as engine, asyncio.timeout(TIMEOUT_S):
            alone = [replace(asked, params=replace(asked.params, n=1, logprobs=2)) for asked in case.requests]
            answers = await asyncio.gather(
                *(_answer(engine, asked, f"request-{place}") for place, asked in enumerate(alone))
            )
        numbers = [asked.params.n for asked in case.requests]
        return [
            Answer(one.tokens * number, one.logprobs * number, one.gaps * number, one.prompt)
            for one, number in zip(answers, numbers, strict=True)
        ]

    async def _found(self, case: Case, draw: random.Random) -> list[Answer | None]:
        async with self._engine(case, case.settings) as engine:
            allocator: Any = engine.pipeline.stages["allocate"].allocator  # type: ignore[attr-defined]
            _plant(engine, case, draw)
            async with asyncio.timeout(TIMEOUT_S):
                answers = await _answer_all(engine, case, draw)
                await _at_rest(allocator)
            allocator.check()
            schedule: Any = engine.pipeline.stages["schedule"]
            for (how, _), number in schedule.scheduler.preemptions.items():
                self.seen[how] += number
            cache = allocator.cache
            self.seen["tokens found"] += cache.num_hits if cache else 0
            self.seen["tokens found on the host"] += cache.num_host_hits if cache else 0
            self.seen["tokens forked"] += cache.num_forked if cache else 0
            self.seen["left"] += answers.count(None)
            self.seen[f"{len(allocator.kinds)} kinds"] += 1
            return answers

    def _engine(self, case: Case, settings: dict[str, Any]) -> Engine:
        common = {"device": "cpu", "dtype": "float32", "attention_backend": case.backend}
        return Engine(model=str(self.folders[case.row]), max_model_len=LENGTH, **common, **settings)


@contextlib.contextmanager
def windows_of(windows: Sequence[int | None]) -> Iterator[None]:
    """The layers of models that are loaded have these windows."""
    choose_impl = early.choose_impl

    def chosen_with_windows(*args: Any) -> tuple[DecoderSpec | None, str]:
        spec, reason = choose_impl(*args)
        assert spec is not None and len(spec.layers) == len(windows)
        layers = []
        for layer, window in zip(spec.layers, windows, strict=True):
            assert isinstance(layer.mixer, AttentionSpec)
            layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
        return replace(spec, layers=tuple(layers)), reason

    with patch.object(early, "choose_impl", chosen_with_windows):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--backend", choices=("native", "torch"), action="append")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began, failures = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as root:
        windows = Windows(Path(root))
        for seed in range(options.seed, options.seed + options.cases):
            case = Case.of(random.Random(seed), options.backend or ("native", "torch"))
            try:
                problems = windows.run(case, seed)
            except Exception as error:
                traceback.print_exc()
                problems = [repr(error)]
            if problems:
                failures += 1
                told = replace(case, requests=[])
                print(f"FAILED --seed {seed} --cases 1: {told}\n  " + "\n  ".join(problems), flush=True)
    seconds = time.perf_counter() - began
    print(f"{options.cases} cases, {failures} failed, {seconds:.0f} s: {dict(windows.seen)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
