"""The load of a benchmark: random prompts or prompts from a file, and arrival times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ....stages.errors import ConfigError

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt: str | list[int] | None  # text or token ids; None: use `messages`
    num_output: int  # maximum tokens of the answer
    messages: list[dict[str, Any]] | None = None


def random_requests(
    num: int, input_len: int, output_len: int, vocab_size: int, rng: Rng, range_ratio: float = 0.0
) -> list[BenchRequest]:
    """Requests with random token ids.

    Lengths are uniform in `len * (1 - range_ratio)` to `len * (1 + range_ratio)`, and at least 1.
    """
    if not 0 <= range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio {range_ratio:g}: must be from 0 to 1")
    inputs, outputs = _lengths(num, input_len, rng, range_ratio), _lengths(num, output_len, rng, range_ratio)
    return [
        BenchRequest(rng.integers(0, vocab_size, num_input).tolist(), num_output)
        for num_input, num_output in zip(inputs, outputs, strict=True)
    ]


def _lengths(num: int, length: int, rng: Rng, range_ratio: float) -> list[int]:
    low, high = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
    lengths: list[int] = rng.integers(low, high + 1, num).tolist()
    return lengths


def read_requests(path: Path, num: int, output_len: int) -> list[BenchRequest]:
    """The first `num` requests of a file of JSON lines. Raises `ConfigError`.

    A line has a `prompt` (text or token ids) or `messages`, and optionally `output_tokens`.
    """
    try:
        requests = list(_read(path, num, output_len))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: --dataset-path must name a file of JSON lines") from None
    if not requests:
        raise ConfigError(f"{path}: contains no requests: must have one JSON object per line")
    return requests


def _read(path: Path, num: int, output_len: int) -> Iterator[BenchRequest]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number > num:
                return
            yield _parse(line, f"{path}:{number}", output_len)


def _parse(line: bytes, where: str, output_len: int) -> BenchRequest:
    try:
        fields = orjson.loads(line)
        prompt, messages = fields.get("prompt"), fields.get("messages")
        num_output = int(fields.get("output_tokens") or output_len)
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError):
        raise ConfigError(f'{where}: must be like {{"prompt": "...", "output_tokens": 20}}') from None
    if prompt is None and messages is None:
        raise ConfigError(f"{where}: must have a prompt or messages")
    return BenchRequest(prompt, num_output, messages)


def arrivals(num: int, rate: float, rng: Rng) -> list[float]:
    """Arrival times in seconds after the start: a Poisson process of `rate` per second; inf: all at 0."""
    if math.isinf(rate):
        return [0.0] * num
    times: list[float] = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    return times
