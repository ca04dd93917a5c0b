"""The metrics of benchmarks, computed from the times of requests.

TTFT   time to the first token, from when the request was sent
TPOT   time per output token after the first: (E2EL - TTFT) / (output tokens - 1); a request of one token has none
ITL    inter-token latency: each gap between two pieces of a stream, over all requests. A piece may hold several tokens
       when the reader is slower than the server, so there may be fewer gaps than tokens
E2EL   end-to-end latency, from when the request was sent to its last piece

Goodput is the rate of requests within all given limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....stages.errors import ConfigError

LIMITED = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times (seconds) and token counts of one request. With an `error` they are not used."""

    num_prompt: int = 0  # tokens
    num_output: int = 0
    ttft_s: float = 0.0
    e2el_s: float = 0.0
    itls_s: tuple[float, ...] = ()
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """None if there is no token after the first."""
        return (self.e2el_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None


class Stopwatch:
    """Measures one stream from the arrival times of its pieces."""

    def __init__(self, began_s: float) -> None:
        self._began_s = self._last_s = self._ended_s = began_s
        self._first_s: float | None = None
        self._gaps: list[float] = []

    def piece(self, now_s: float) -> None:
        """Notes a piece with text."""
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps.append(now_s - self._last_s)
        self._last_s = self._ended_s = now_s

    def end(self, now_s: float) -> None:
        """Notes the last piece, which may have no text."""
        self._ended_s = now_s

    @property
    def num_pieces(self) -> int:
        """Pieces with text."""
        return 0 if self._first_s is None else 1 + len(self._gaps)

    def record(self, num_prompt: int, num_output: int) -> RequestRecord:
        """The record of the stream. An answer without text has its first token at its end."""
        first_s = self._ended_s if self._first_s is None else self._first_s
        began_s = self._began_s
        return RequestRecord(num_prompt, num_output, first_s - began_s, self._ended_s - began_s, tuple(self._gaps))


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    goodput_ms: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The report under vLLM's names. Rates are per second of `duration_s`, without failed requests."""
    done = [record for record in records if record.error is None]
    num_input, num_output = sum(record.num_prompt for record in done), sum(record.num_output for record in done)
    report: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    if goodput_ms:
        report["request_goodput"] = sum(is_good(record, goodput_ms) for record in done) / duration_s
    report |= statistics("ttft", [record.ttft_s for record in done], percentiles)
    report |= statistics("tpot", [tpot_s for record in done if (tpot_s := record.tpot_s) is not None], percentiles)
    report |= statistics("itl", [itl_s for record in done for itl_s in record.itls_s], percentiles)
    return report | statistics("e2el", [record.e2el_s for record in done], percentiles)


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, population standard deviation and interpolated percentiles, in ms; 0 without values."""
    ms = 1e3 * np.array(seconds or [0.0])
    found = {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": ms.std()}
    found |= {f"p{percentile:g}_{name}_ms": np.percentile(ms, percentile) for percentile in percentiles}
    return {key: float(value) for key, value in found.items()}


def is_good(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    """Whether the request is within each limit in ms. A missing TPOT is within."""
    seconds = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(1e3 * seconds[name] <= limit for name, limit in goodput_ms.items())


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in ms from texts such as `ttft:500`. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITED or not limits[name] >= 0:
            raise ConfigError(f"--goodput {text}: must be ttft, tpot or e2el, a colon and milliseconds: ttft:500")
    return limits
