"""Helpers of the benchmarks with an engine in this process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....stages.config import EngineConfig
from ....stages.errors import ConfigError, RequestError
from ....stages.messages import ChatPrompt, Prompt
from ....stages.params import SamplingParams
from .load import BenchRequest, Rng, random_requests, read_requests
from .measures import RequestRecord, Stopwatch

if TYPE_CHECKING:
    from ....stages.engine.engine import Engine


def make_engine(config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
    """The engine, to be started with `async with`."""
    from ....stages.engine.engine import Engine  # imports torch

    return Engine(config)


async def run_request(
    engine: Engine, request: BenchRequest, adapter: str | None = None, *, ignore_eos: bool = True
) -> RequestRecord:
    """Runs one request with greedy sampling, on a LoRA adapter or the base, and returns its record."""
    params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=ignore_eos)
    watch = Stopwatch(time.perf_counter())
    num_prompt = num_output = 0
    try:
        async for output in engine.generate(_as_prompt(request), params, adapter=adapter):
            watch.piece(time.perf_counter())
            num_prompt, num_output = output.num_prompt_tokens, output.num_generated_tokens
    except RequestError as error:
        return RequestRecord(error=str(error))
    return watch.record(num_prompt, num_output)


def _as_prompt(request: BenchRequest) -> str | Sequence[int] | Prompt:
    return Prompt(chat=ChatPrompt(tuple(request.messages or ()))) if request.prompt is None else request.prompt


def make_requests(engine: Engine, options: argparse.Namespace, num: int, rng: Rng) -> list[BenchRequest]:
    """The requests for the options. `ConfigError` if random ones may exceed the model's context."""
    path: Path | None = options.dataset_path
    if path is not None:
        return read_requests(path, num, options.output_len)
    ratio, limit = options.random_range_ratio, engine.info.max_model_len
    longest = (options.input_len + options.output_len) * (1 + ratio)
    if longest > limit:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} need up to {longest:g} tokens, "
            f"but the model's context has {limit}: reduce one of them"
        )
    return random_requests(num, options.input_len, options.output_len, engine.info.vocab_size, rng, ratio)


def make_rng(seed: int) -> Rng:
    """A generator for a reproducible load."""
    return np.random.default_rng(seed)
