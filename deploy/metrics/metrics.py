"""The metrics of `GET /metrics`, with vLLM's names where it has them.

vLLM's names keep its dashboards and autoscalers working. Values are read from the engine's counters at each scrape;
nothing here runs per token. The pipeline fixes the set of series: no label contains client data, except those that
stages of one's own write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...runtime.env.log import dropped as dropped_lines
from ...runtime.pipeline import Health
from ..errors import CODES
from .adapter_families import adapters
from .families import counter, engines, gauge
from .ignored_fields import IgnoredFields
from .latencies import Latencies
from .latency_log import LatencyLog
from .own_metrics import own_metrics
from .pipeline_metrics import channels, stages
from .stage_load import StageLoad
from .traffic_families import traffic_families

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import (
        CacheStatus,
        CoreStatus,
        DraftStatus,
        HostStatus,
        PoolStatus,
        SchedulerStatus,
    )
    from ...stages.engine.front_status import AdmissionStatus
    from ...stages.exit.outboxes import RequestOutbox
    from .otlp_export import OtlpExporter
    from .watchdog import Watchdog

FINISH_REASONS = ("stop", "length", "abort", "error")
CAUSES = ("cancel", "disconnect", "deadline", "stalled_reader", "server_shutdown", "abort")
HEALTH_STATES = ("loading", "ready", "stalled", "draining", "dead")
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The metrics of one server.

    Call `watch` once the engine exists; `render` works at any time.
    """

    def __init__(self, watchdog: Watchdog, health: Callable[[], Health] | None = None) -> None:
        """`health` is the server's, as `/health` tells it."""
        self._watchdog = watchdog
        self._health = health
        self._model_name = ""
        self._engine: Engine | None = None
        self._latencies: Latencies | None = None
        self.latency_log: LatencyLog | None = None
        self.stage_load: StageLoad | None = None
        self.otlp_exporter: OtlpExporter | None = None  # its counts are exported too
        self.ignored_fields = IgnoredFields()  # likewise; replaced by the server's
        self._finished: Counter[str] = Counter()  # choices by finish reason
        self._aborted: Counter[str] = Counter()  # requests by cause
        self._rejected: Counter[str] = Counter()  # requests by error code
        self._num_prompt = 0  # tokens of requests that have ended
        self._num_generated = 0
        self._num_cached = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def watch(self, engine: Engine, model_name: str) -> None:
        """Starts to count the engine's requests, with `model_name` as a label."""
        self._model_name = model_name
        self._engine, self._latencies = engine, Latencies(engine)
        engine.exit.on_end.append(self._request_ended)
        engine.exit.on_start.append(self._latencies.request_started)
        self.latency_log = LatencyLog(self._latencies.times_us(), engine.pipeline.env.now)
        self.stage_load = StageLoad(engine.pipeline.status, engine.pipeline.env.now)
        if engine.pipeline.watch is not None:
            engine.pipeline.watch.on_tick += [self.latency_log.tick, self.stage_load.note]

    @property
    def latencies(self) -> Latencies | None:
        """The histograms of requests; None before `watch`."""
        return self._latencies

    def count_rejection(self, code: str) -> None:
        """Counts a request that was answered with an error."""
        self._rejected[code if code in CODES else "other"] += 1

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def num_tokens(self, engine: Engine) -> tuple[int, int]:
        """Prompt tokens and generated tokens so far, running requests included."""
        assert engine.pipeline.exit is not None
        live = [outbox for outbox in engine.pipeline.exit.live.values() if outbox.request.parent_id is None]
        num_prompt = self._num_prompt + sum(outbox.num_prompt_tokens for outbox in live)
        return num_prompt, self._num_generated + sum(outbox.num_generated_tokens for outbox in live)

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if outbox.request.parent_id is not None:
            return  # one step of a beam search, which counts once, as its parent request
        self._num_prompt += outbox.num_prompt_tokens
        self._num_generated += outbox.num_generated_tokens
        self._num_cached += outbox.num_cached_tokens
        if error is not None:
            self._finished["error"] += len(outbox.choices)
            return
        for choice in outbox.choices:
            reason = choice.finish.reason.name.lower() if choice.finish is not None else "abort"
            self._finished[reason] += 1
        if cause == "finish":
            assert self._latencies is not None
            self._latencies.request_finished(outbox)
        else:
            self._aborted[cause if cause in CAUSES else "cancel"] += 1

    # -- reading the engine

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client at each scrape."""
        labels = {"model_name": self._model_name, "engine": "0"}
        yield from self._rejections()
        if self._health is not None:
            yield _states(self._health())
        yield from self._watchdog.meter.collect()
        yield counter("millrace:stalls", "Stalls: work waits without progress.", self._watchdog.num_stalls, {})
        sent, dropped = (
            (0, 0) if self.otlp_exporter is None else (self.otlp_exporter.num_sent, self.otlp_exporter.num_dropped)
        )
        yield counter("millrace:otlp_requests_sent", "Requests exported to the collector.", sent, {})
        yield counter("millrace:otlp_requests_dropped", "Requests that could not be exported.", dropped, {})
        num_ignored = self.ignored_fields.num_fields
        yield counter("millrace:ignored_fields", "Unknown fields of requests, which were ignored.", num_ignored, {})
        yield counter("millrace:log_lines_dropped", "Log lines that could not be written in time.", dropped_lines(), {})
        if self._engine is None:
            return
        status = self._engine.status()
        if status.core is not None:
            yield from self._gauges(self._engine, status.front.admission, status.core, labels)
            yield from _core_counters(status.core.scheduler, status.core.cache, labels)
            wall_s = self._engine.pipeline.env.wall_time()
            names = None if self._engine.adapters is None else self._engine.adapters.names_by_digest()
            yield from adapters(names, status.front.adapters, status.core.scheduler.adapters, wall_s)
        yield from self._counters(self._engine, labels)
        name, text = "millrace:engine_process_deaths", "Engine processes that ended unexpectedly."
        yield counter(name, text, self._engine.num_deaths, {})
        yield from engines(self._engine.engines)
        yield from traffic_families(self._engine.traffic)
        assert self._latencies is not None
        yield from self._latencies.collect(labels, status)
        yield from stages(status.pipeline)
        yield from channels(status.pipeline)
        yield from own_metrics(self._engine.pipeline.stage_metrics)
        yield _startup(self._engine)

    def _gauges(
        self, engine: Engine, admission: AdmissionStatus, core: CoreStatus, labels: dict[str, str]
    ) -> Iterator[Metric]:
        scheduler, pool = core.scheduler, core.cache.pool
        yield gauge("vllm:num_requests_running", "Running sequences.", scheduler.num_running, labels)
        yield gauge("vllm:num_requests_waiting", "Waiting sequences.", scheduler.num_waiting, labels)
        work_s = admission.work_waiting_s
        yield gauge("millrace:work_seconds_waiting", "Estimated time to serve what waits.", work_s, labels)
        yield gauge("vllm:num_requests_swapped", "Sequences swapped out to the host.", scheduler.num_swapped, labels)
        yield gauge(
            "millrace:num_requests_parked", "Sequences whose clients do not read.", scheduler.num_parked, labels
        )
        used = core.cache.used_share
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", used, labels)
        yield _cache_config(engine, labels)
        text = "KV blocks by state; shared ones are also in used."
        if core.cache.kinds:
            yield _blocks_of_kinds(text, core.cache, labels)
            yield _slabs(core.cache, labels)
        else:
            yield _blocks("millrace:kv_blocks", text, pool, labels)
        yield _admission_blocked(scheduler.admission_blocked_reason)
        budget = scheduler.step_token_budget
        yield gauge("millrace:step_token_budget", "Token budget of a step with prefills and decodes.", budget, labels)
        waste = core.cache.waste
        yield gauge("millrace:kv_internal_fragmentation_ratio", "Unused share of allocated block space.", waste, labels)
        host = None if core.cache.host is None else core.cache.host.pool
        used = 0.0 if host is None else host.num_in_use / host.num_blocks
        yield gauge("vllm:cpu_cache_usage_perc", "Share of host KV blocks in use; 1 is all.", used, labels)
        if host is not None:
            yield _blocks("millrace:host_kv_blocks", "Host KV blocks by state.", host, labels)

    def _counters(self, engine: Engine, labels: dict[str, str]) -> Iterator[Metric]:
        num_prompt, num_generated = self.num_tokens(engine)
        yield counter("vllm:prompt_tokens", "Prompt tokens received.", num_prompt, labels)
        yield counter("vllm:generation_tokens", "Tokens generated.", num_generated, labels)
        text = "Tokens of prompts that were cached, of requests that have ended."
        yield counter("millrace:cached_prompt_tokens", text, self._num_cached, labels)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished choices by reason.", labels=[*labels, "finished_reason"]
        )
        for reason in FINISH_REASONS:
            success.add_metric([*labels.values(), reason], self._finished[reason])
        yield success
        aborted = CounterMetricFamily("millrace:requests_aborted", "Requests ended early, by cause.", labels=["cause"])
        for cause in CAUSES:
            aborted.add_metric([cause], self._aborted[cause])
        yield aborted

    def _rejections(self) -> Iterator[Metric]:
        rejected = CounterMetricFamily("millrace:request_errors", "Requests answered with an error.", labels=["code"])
        for code in (*CODES, "other"):
            rejected.add_metric([code], self._rejected[code])
        yield rejected


def _core_counters(scheduler: SchedulerStatus, cache: CacheStatus, labels: dict[str, str]) -> Iterator[Metric]:
    yield counter("vllm:num_preemptions", "Preemptions of sequences.", scheduler.num_preemptions, labels)
    yield _preemptions(scheduler.preemptions)
    yield _swaps_refused(cache.host)
    num_recomputed = scheduler.num_recomputed_tokens
    yield counter("millrace:recomputed_tokens", "Tokens computed again after a preemption.", num_recomputed, labels)
    yield from _drafts(scheduler.drafts, labels)
    found = cache.prefixes
    queries, hits, on_host = (0, 0, 0) if found is None else (found.num_queries, found.num_hits, found.num_host_hits)
    yield counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", queries, labels)
    yield counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", hits, labels)
    yield counter("millrace:host_prefix_cache_hits", "Prefix cache hits on the host.", on_host, labels)


def _states(health: Health) -> Metric:
    states = GaugeMetricFamily("millrace:health", "1 for the state that /health tells.", labels=["state"])
    for state in HEALTH_STATES:
        states.add_metric([state], float(health.state == state))
    return states


def _cache_config(engine: Engine, labels: dict[str, str]) -> Metric:
    """The sizes of the cache, as labels: gateways compute free tokens from them."""
    info, config = engine.info, engine.config
    sizes = {
        "block_size": info.block_size,
        "num_gpu_blocks": info.num_blocks,
        "num_cpu_blocks": info.num_host_blocks,
        "cache_dtype": info.kv_cache_dtype or "auto",
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    described = labels | {name: str(value) for name, value in sizes.items()}
    return gauge("vllm:cache_config_info", "The KV cache, as labels; the value is 1.", 1.0, described)


def _drafts(speculation: DraftStatus, labels: dict[str, str]) -> Iterator[Metric]:
    num_drafting = speculation.num_drafting
    yield gauge("millrace:num_requests_drafting", "Sequences with speculative decoding.", num_drafting, labels)
    name, text = "vllm:spec_decode_num_drafts", "Rows of steps with draft tokens."
    yield counter(name, text, speculation.num_drafts, labels)
    name, text = "vllm:spec_decode_num_draft_tokens", "Draft tokens."
    yield counter(name, text, speculation.num_draft_tokens, labels)
    name, text = "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."
    yield counter(name, text, speculation.num_accepted_tokens, labels)
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position in the draft.",
        labels=[*labels, "position"],
    )
    for place, count in enumerate(speculation.num_accepted_at):
        by_place.add_metric([*labels.values(), str(place)], count)
    yield by_place


def _preemptions(counts: Mapping[tuple[str, str], int]) -> Metric:
    preemptions = CounterMetricFamily(
        "millrace:preemptions", "Preemptions of sequences, by mode and cause.", labels=["mode", "cause"]
    )
    for mode in ("swap", "recompute"):
        for cause in ("blocks", "slot", "adapter", "rope"):
            if cause != "rope" or mode == "recompute":
                preemptions.add_metric([mode, cause], counts.get((mode, cause), 0))
    return preemptions


def _swaps_refused(host: HostStatus | None) -> Metric:
    refused = CounterMetricFamily(
        "millrace:swaps_refused", "Preemptions that recompute instead of swapping, by reason.", labels=["reason"]
    )
    counts = {"full": 0, "slower": 0} if host is None else {"full": host.num_full, "slower": host.num_dear}
    for reason, count in counts.items():
        refused.add_metric([reason], count)
    return refused


def _admission_blocked(reason: str) -> Metric:
    blocked = GaugeMetricFamily(
        "millrace:admission_blocked",
        "1 while admission is blocked, by what the first waiting sequence lacks.",
        labels=["reason"],
    )
    for name in ("blocks", "swapped"):
        blocked.add_metric([name], float(reason == name))
    return blocked


def _blocks(name: str, text: str, pool: PoolStatus, labels: dict[str, str]) -> Metric:
    blocks = GaugeMetricFamily(name, text, labels=[*labels, "state"])
    for state, count in _by_state(pool).items():
        blocks.add_metric([*labels.values(), state], count)
    return blocks


def _blocks_of_kinds(text: str, cache: CacheStatus, labels: dict[str, str]) -> Metric:
    """As `_blocks`, by kind of memory. Blocks of slabs that a kind does not have count as none of its."""
    blocks = GaugeMetricFamily("millrace:kv_blocks", text, labels=[*labels, "kind", "state"])
    for number, kind in enumerate(cache.kinds):
        for state, count in _by_state(kind.pool).items():
            blocks.add_metric([*labels.values(), kind_label(cache, number), state], count)
    return blocks


def _slabs(cache: CacheStatus, labels: dict[str, str]) -> Metric:
    slabs = GaugeMetricFamily("millrace:kv_slabs", "KV slabs by the kind that has them.", labels=[*labels, "kind"])
    for number, kind in enumerate(cache.kinds):
        slabs.add_metric([*labels.values(), kind_label(cache, number)], kind.num_slabs)
    free = cache.num_slabs - sum(kind.num_slabs for kind in cache.kinds)
    slabs.add_metric([*labels.values(), "none"], free)
    return slabs


def kind_label(cache: CacheStatus, number: int) -> str:
    """The name of a kind, with its number if another has the same."""
    names = [kind.name for kind in cache.kinds]
    return names[number] if names.count(names[number]) == 1 else f"{names[number]}_{number}"


def _by_state(pool: PoolStatus) -> dict[str, int]:
    return {
        "free": pool.num_free,
        "used": pool.num_in_use,
        "shared": pool.num_shared,
        "cached": pool.num_cached,
        "quarantined": pool.num_quarantined,
    }


def _startup(engine: Engine) -> Metric:
    seconds = GaugeMetricFamily("millrace:startup_seconds", "Duration of each phase of the start.", labels=["phase"])
    for phase, value in engine.info.startup_s.items():
        seconds.add_metric([phase], value)
    return seconds
