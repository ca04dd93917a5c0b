"""What is asked in a benchmark, and when: prompts drawn at random or read from a file, and times of arrival."""

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
class Ask:
    """One request."""

    prompt: str | list[int] | None  # None: there are messages
    num_output: int  # tokens, at most
    messages: list[dict[str, Any]] | None = None


def random_asks(
    num: int, input_len: int, output_len: int, vocab_size: int, rng: Rng, range_ratio: float = 0.0
) -> list[Ask]:
    """Prompts of random token ids. Lengths are drawn evenly from `len * (1 - range_ratio)` to
    `len * (1 + range_ratio)`, and are at least 1."""
    if not 0 <= range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio {range_ratio:g}: must be from 0 to 1")
    inputs, outputs = _lengths(num, input_len, rng, range_ratio), _lengths(num, output_len, rng, range_ratio)
    return [
        Ask(rng.integers(0, vocab_size, num_input).tolist(), num_output)
        for num_input, num_output in zip(inputs, outputs, strict=True)
    ]


def _lengths(num: int, length: int, rng: Rng, range_ratio: float) -> list[int]:
    low, high = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
    lengths: list[int] = rng.integers(low, high + 1, num).tolist()
    return lengths


def read_asks(path: Path, num: int, output_len: int) -> list[Ask]:
    """The first `num` of a file of JSON lines with a `prompt` (text or token ids) or `messages`, and perhaps
    `output_tokens`. Raises `ConfigError`."""
    try:
        asks = list(_read(path, num, output_len))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: --dataset-path names a file of JSON lines") from None
    if not asks:
        raise ConfigError(f"{path}: there is no line in it")
    return asks


def _read(path: Path, num: int, output_len: int) -> Iterator[Ask]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number > num:
                return
            yield _parse(line, f"{path}:{number}", output_len)


def _parse(line: bytes, where: str, output_len: int) -> Ask:
    try:
        asked = orjson.loads(line)
        prompt, messages = asked.get("prompt"), asked.get("messages")
        num_output = int(asked.get("output_tokens") or output_len)
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError):
        raise ConfigError(f'{where}: must be like {{"prompt": "...", "output_tokens": 20}}') from None
    if prompt is None and messages is None:
        raise ConfigError(f"{where}: has neither a prompt nor messages")
    return Ask(prompt, num_output, messages)


def arrivals(num: int, rate: float, rng: Rng) -> list[float]:
    """Seconds after the start at which requests come: a Poisson process of `rate` a second; inf: all at once."""
    if math.isinf(rate):
        return [0.0] * num
    times: list[float] = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    return times
