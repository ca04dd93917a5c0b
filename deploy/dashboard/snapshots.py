"""The current state of the engine as plain data, read from its own counters.

Each function makes one topic of the dashboard's feed. Its cost depends on the number of stages, slots or shown rows,
not on tokens. Counters run from the start of the engine; the viewer takes differences. Durations are in seconds, times
on the engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.health.flight_recorder import task_stacks
from ...runtime.histogram import GROWTH
from ..inspect.server_info import HIDDEN
from ..settings import ENGINE_HELP, SECRET, SERVER_HELP
from .adapters import adapter_of, adapter_slots, names_of
from .block_map import BlockOwners

if TYPE_CHECKING:
    from ...runtime.histogram import LatencyHistogram
    from ...runtime.pipeline import Health
    from ...stages.allocate.block_pool import BlockPool
    from ...stages.allocate.prefix_cache import PrefixCache
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox
    from ...stages.schedule.scheduler import Scheduler
    from ...stages.schedule.sequence import Sequence
    from ..api.service import Service
    from ..metrics.latencies import Latencies
    from ..metrics.stage_load import StageLoad
    from ..metrics.watchdog import Watchdog
    from .flow import FlowRates


def overview(engine: Engine, health: Health) -> dict[str, Any]:
    """Health, requests by state, and KV blocks by state."""
    assert engine.pipeline.exit is not None
    found: dict[str, Any] = {
        "health": {"state": health.state, "stage": health.stage, "reason": health.reason},
        "num_live": len(engine.pipeline.exit.live),
    }
    if not engine.has_core:
        return found
    host = None if engine.host_tier is None else engine.host_tier.pool
    found |= core_figures(engine.scheduler, engine.prefix_cache, engine.pool, host)
    return found | adapter_slots(engine.scheduler.adapters, names_of(engine))


def core_figures(
    scheduler: Scheduler, cache: PrefixCache | None, pool: BlockPool, host: BlockPool | None
) -> dict[str, Any]:
    """The part of the overview from schedule and allocate."""
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_swapped": scheduler.num_swapped,
        "num_parked": scheduler.num_parked,
        "num_preemptions": scheduler.num_preemptions,
        "num_recomputed_tokens": scheduler.num_recomputed_tokens,
        "max_num_seqs": scheduler.limits.max_num_seqs,
        "admission_blocked_reason": scheduler.admission_blocked_reason,
        "prefix_cache": None if cache is None else {"num_queries": cache.num_queries, "num_hits": cache.num_hits},
        "blocks": block_counts(pool),
        "host_blocks": None if host is None else block_counts(host),
    }


def pipeline(engine: Engine, load: StageLoad | None, flow: FlowRates) -> dict[str, Any]:
    """Stages and channels with their counters, in order of the flow; shares of the last seconds from `load`.

    The rates of the channels in the last seconds are from `flow`.
    """
    running = engine.pipeline
    edges = {edge.name: edge for edge in running.edges}
    shares = {} if load is None else load.shares()
    stages = {}
    for name, runner in running.runners.items():
        times = runner.times
        busy, blocked = shares.get(name, (0.0, 0.0))
        stages[name] = {
            "busy": round(busy, 4),
            "blocked": round(blocked, 4),
            "idle_s": round(times.idle, 6),
            "busy_s": round(times.busy, 6),
            "blocked_s": round(times.blocked, 6),
            "num_restarts": runner.num_restarts,
            "num_dropped": runner.num_dropped,
            "last_progress_s": round(runner.last_progress_s, 3),
        }
    channels = {}
    for name, channel in running.channels.items():
        stats, edge = channel.stats(), edges.get(name)
        source = "client" if edge is None else edge.source.stage
        target = name.partition(".")[0] if edge is None else edge.target.stage
        channels[name] = {
            "source": source,
            "target": target,
            "when_full": "wait" if edge is None else edge.when_full,
            "capacity": stats.capacity,
            "depth": stats.depth,
            "high_water": stats.high_water,
            "num_sent": stats.num_sent,
            "seconds_full": round(stats.seconds_full, 6),
        } | flow.of(name, source, target)
    return {"stages": stages, "edges": channels}


def request_row(engine: Engine, outbox: RequestOutbox) -> dict[str, Any]:
    """One live request."""
    request = outbox.request
    sequences = list(_sequences(engine, outbox)) if engine.has_core else []
    stage, _ = engine.pipeline.exit.locate(outbox) if engine.has_core else ("encode", False)  # type: ignore[union-attr]
    num_prompt = outbox.num_prompt_tokens or (sequences[0].num_prompt if sequences else 0)
    slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
    times, state = outbox.times, _state(sequences, outbox)
    return adapter_of(engine, outbox, state) | {
        "id": outbox.request_id,
        "stage": stage,
        "state": state,
        "arrival_s": round(times.arrival_s, 3),
        "ttft_s": None if times.first_token_s is None else round(times.first_token_s - times.arrival_s, 6),
        "num_choices": request.num_sequences,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": outbox.num_cached_tokens,
        "num_generated_tokens": outbox.num_generated_tokens,
        "max_tokens": sum(sequence.limit - sequence.num_prompt for sequence in sequences) or None,
        "num_blocks": sum(int(engine.block_tables.num_blocks[slot]) for slot in slots),  # faster than an array
        "priority": request.priority,
        "num_preempted": sum(sequence.num_preempted for sequence in sequences),
    }


def ended_request(outbox: RequestOutbox, cause: str) -> dict[str, Any]:
    """The row of a request that has just ended."""
    times = outbox.times
    return {
        "id": outbox.request_id,
        "cause": cause,
        "arrival_s": round(times.arrival_s, 3),
        "ttft_s": None if times.first_token_s is None else round(times.first_token_s - times.arrival_s, 6),
        "took_s": None if times.last_token_s is None else round(times.last_token_s - times.arrival_s, 6),
        "num_prompt_tokens": outbox.num_prompt_tokens,
        "num_generated_tokens": outbox.num_generated_tokens,
    }


def latency(latencies: Latencies) -> dict[str, Any]:
    """Latency histograms: exact counts by bucket, as in `/metrics`, and sketches; sums in microseconds."""
    return {name: histogram_tree(times) for name, times in latencies.times_us().items()}


def loop_health(engine: Engine, watchdog: Watchdog, *, with_stacks: bool = True) -> dict[str, Any]:
    """The current stall, the stack of each stage's task, and histograms of loop lag and GC pauses."""
    stall, runners = watchdog.stall, engine.pipeline.runners
    stacks = [*task_stacks(engine.pipeline, only=runners), *engine.pipeline.stacks_elsewhere] if with_stacks else []
    return {
        "stall": None
        if stall is None
        else {"name": stall.name, "reason": stall.reason, "num_waiting": stall.num_waiting},
        "num_stalls": watchdog.num_stalls,
        "stacks": {entry["task"]: entry["stack"] for entry in stacks if entry.get("task") in runners},
        "lag": histogram_tree(watchdog.meter.lag_us),
        "pause": histogram_tree(watchdog.meter.pause_us),
    }


def histogram_tree(of: LatencyHistogram) -> dict[str, Any]:
    """A histogram for the page, which reads quantiles from `sketch`."""
    sketch = {str(place): count for place, count in of.sketch.copy().items()}
    return {"bounds_us": of.bounds, "counts": list(of.counts), "total_us": of.total, "sketch": sketch, "growth": GROWTH}


def block_owners(engine: Engine) -> BlockOwners:
    """Pool, block tables and scheduler of the engine."""
    return BlockOwners(engine.pool, engine.block_tables, engine.scheduler)


def configuration(engine: Engine, service: Service) -> list[dict[str, Any]]:
    """Every effective setting with its value, source and help text. Secrets are masked."""
    effective = {
        "model": engine.info.model_id,
        "dtype": engine.info.dtype,
        "kv_cache_dtype": engine.info.kv_cache_dtype or "auto",
        "device": engine.info.device,
        "attention_backend": engine.info.attention_backend,
        "max_model_len": engine.info.max_model_len,
        "num_gpu_blocks": engine.info.num_blocks,
    }
    rows = []
    for config, helps in ((engine.config, ENGINE_HELP), (service.config, SERVER_HELP)):
        for group, texts in helps.items():
            for name, text in texts.items():
                value = effective.get(name, getattr(config, name))
                shown = HIDDEN if name in SECRET and value else value
                source = service.sources.get(name, "")
                rows.append({"group": group, "name": name, "value": shown, "source": source, "help": text})
    return rows


def is_found(search: str, outbox: RequestOutbox) -> bool:
    """Whether a request has the text in its id or in the name of its adapter."""
    adapter = outbox.request.adapter
    return search in outbox.request_id or (adapter is not None and search in adapter.name)


def _sequences(engine: Engine, outbox: RequestOutbox) -> Iterator[Sequence]:
    known, first = engine.scheduler.sequences, outbox.request.first_sequence_id
    return (known[i] for i in range(first, first + outbox.request.num_sequences) if i in known)


def _state(sequences: list[Sequence], outbox: RequestOutbox) -> str:
    """The state of a request; of several choices, that of the most advanced one."""
    if any(choice.is_parked for choice in outbox.choices):
        return "parked"
    states = {sequence.state.value for sequence in sequences}
    for state in ("running", "swapped", "preempted", "parked", "waiting"):
        if state in states:
            return state
    return "finishing" if outbox.has_started else "arriving"


def block_counts(pool: BlockPool) -> dict[str, int]:
    """The blocks of one pool by state; shared blocks are in use too."""
    return {
        "num_blocks": pool.num_blocks,
        "free": pool.num_free,
        "in_use": pool.num_in_use,
        "shared": int(np.count_nonzero(pool.num_tables > 1)),
        "cached": pool.num_cached,
        "quarantined": pool.num_quarantined,
    }
