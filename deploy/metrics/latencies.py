"""Histograms of request latencies and sizes, with vLLM's names and buckets.

They are updated when a request gets its first token and when it ends; nothing here runs per token. A request with
several prompts or choices counts once. A request that was cancelled, timed out or failed counts only in the time to
first token, if it got one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from ...runtime.histogram import Histogram, LatencyHistogram
from .families import US, histogram

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import EngineStatus
    from ...stages.exit.outboxes import RequestOutbox

FIRST_TOKEN_MS = (
    *(1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500),
    *(10_000, 20_000, 40_000, 80_000, 160_000, 640_000, 2_560_000),
)
REQUEST_MS = (
    *(300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000),
    *(120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000),
)
FIRST_TOKEN_US, REQUEST_US = (tuple(1000 * ms for ms in bounds) for bounds in (FIRST_TOKEN_MS, REQUEST_MS))
NUM_CHOICES = (1, 2, 5, 10, 20)

TIMES = {  # name -> help text
    "e2e_request_latency": "Time from a request's arrival to its end.",
    "request_queue_time": "Time from a request's arrival until the device starts on it.",
    "request_prefill_time": "Time from the device's start on a request to its first token.",
    "request_decode_time": "Time from a request's first token to its last.",
    "request_inference_time": "Time from the device's start on a request to its last token.",
    "request_time_per_output_token": "Mean time between tokens of a request's longest choice.",
}
SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request, over all choices.",
    "request_max_num_generation_tokens": "Generated tokens of a request's longest choice.",
    "request_params_max_tokens": "Values of max_tokens in requests.",
}


class Latencies:
    """The histograms of one engine's requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first_token = LatencyHistogram(FIRST_TOKEN_US)
        per_token = engine.token_gaps_us.bounds if engine.has_core else REQUEST_US
        self._times = {name: LatencyHistogram(per_token if "per_output" in name else REQUEST_US) for name in TIMES}
        self._sizes = {name: Histogram(one_two_five(engine.info.max_model_len)) for name in SIZES}
        self._num_choices = Histogram(NUM_CHOICES)

    def request_started(self, request_id: str) -> None:
        """Called at a request's first token.

        A beam search does not count, as its answers arrive together.
        """
        outbox = self._engine.exit.live.get(request_id)
        if outbox is not None and outbox.request.pooling is None and outbox.times.first_token_s is not None:
            self._first_token.observe(_us(outbox.times.arrival_s, outbox.times.first_token_s))

    def request_finished(self, outbox: RequestOutbox) -> None:
        """Called when a request has ended with a complete answer."""
        request, times = outbox.request, outbox.times
        counts = [choice.num_generated for choice in outbox.choices]
        ended_s = self._engine.pipeline.env.now() if times.last_token_s is None else times.last_token_s
        self._times["e2e_request_latency"].observe(_us(times.arrival_s, ended_s))
        if times.began_s is not None:
            self._times["request_queue_time"].observe(_us(times.arrival_s, times.began_s))
            self._times["request_inference_time"].observe(_us(times.began_s, ended_s))
            if times.first_token_s is not None:
                self._times["request_prefill_time"].observe(_us(times.began_s, times.first_token_s))
        if times.first_token_s is not None and request.pooling is None:
            decode_us = _us(times.first_token_s, ended_s)
            self._times["request_decode_time"].observe(decode_us)
            if max(counts) > 1:
                self._times["request_time_per_output_token"].observe(decode_us // (max(counts) - 1))
        self._sizes["request_prompt_tokens"].observe(outbox.num_prompt_tokens)
        if request.pooling is None:
            self._sizes["request_generation_tokens"].observe(sum(counts))
            self._sizes["request_max_num_generation_tokens"].observe(max(counts))
            if request.params.max_tokens is not None:
                self._sizes["request_params_max_tokens"].observe(request.params.max_tokens)
            self._num_choices.observe(request.params.n)

    def times_us(self) -> dict[str, LatencyHistogram]:
        """Histograms of client waiting times, in microseconds, by name without prefix and unit."""
        waits: dict[str, LatencyHistogram] = {"time_to_first_token": self._first_token}
        if self._engine.has_core:
            waits["inter_token_latency"] = self._engine.token_gaps_us
        return waits | {name: self._times[name] for name in ("request_queue_time", "e2e_request_latency")}

    def collect(self, labels: Mapping[str, str], status: EngineStatus) -> Iterator[Metric]:
        """Yields all histograms as Prometheus metrics; times are in seconds."""
        text = "Time from a request's arrival to its first token."
        yield histogram("vllm:time_to_first_token_seconds", text, self._first_token, labels, US)
        if (gaps := status.front.token_gaps_us) is not None:
            yield histogram("vllm:inter_token_latency_seconds", "Time between tokens of a choice.", gaps, labels, US)
        if (core := status.core) is not None:
            yield histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", core.step_tokens, labels)
            if (idle := core.idle_gaps_us) is not None:
                text = "Idle time of the device between two steps while work was waiting."
                yield histogram("millrace:device_idle_gap_seconds", text, idle, labels, US)
        for name, text in TIMES.items():
            yield histogram(f"vllm:{name}_seconds", text, self._times[name], labels, US)
        for name, text in SIZES.items():
            yield histogram(f"vllm:{name}", text, self._sizes[name], labels)
        yield histogram("vllm:request_params_n", "Values of n in requests.", self._num_choices, labels)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `most`: vLLM's buckets for token counts."""
    bounds = [step * 10**exponent for exponent in range(len(str(most))) for step in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= max(1, most))


def _us(begin_s: float, end_s: float) -> int:
    return max(0, int((end_s - begin_s) * 1e6))
