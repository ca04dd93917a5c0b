"""The current state of the engine as plain data, read from its own counters.

Each function makes one topic of the dashboard's feed. Its cost depends on the number of stages, slots or shown rows,
not on tokens. Counters run from the start of the engine; the viewer takes differences. Durations are in seconds, times
on the engine's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.health.flight_recorder import task_stacks
from ...runtime.histogram import GROWTH
from ..inspect.server_info import HIDDEN
from ..settings.fields import Kind, groups_of
from .adapters import adapter_of, adapter_slots, names_of
from .block_map import BlockOwners

if TYPE_CHECKING:
    from ...runtime.histogram import LatencyHistogram
    from ...runtime.pipeline import Health
    from ...runtime.pipeline_status import PipelineStatus
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import CacheStatus, EngineStatus, PoolStatus, SchedulerStatus, SequenceRow
    from ...stages.exit.outboxes import RequestOutbox
    from ..api.service import Service
    from ..metrics.latencies import Latencies
    from ..metrics.stage_load import StageLoad
    from ..metrics.watchdog import Watchdog
    from .flow import FlowRates


def overview(engine: Engine, status: EngineStatus, health: Health) -> dict[str, Any]:
    """Health, requests by state, and KV blocks by state."""
    assert engine.pipeline.exit is not None
    found: dict[str, Any] = {
        "health": {"state": health.state, "stage": health.stage, "reason": health.reason},
        "num_live": len(engine.pipeline.exit.live),
    }
    if (core := status.core) is None:
        return found
    found |= core_figures(core.scheduler, core.cache)
    return found | adapter_slots(core.scheduler.adapters, names_of(engine))


def core_figures(scheduler: SchedulerStatus, cache: CacheStatus) -> dict[str, Any]:
    """The part of the overview from schedule and allocate."""
    prefixes = cache.prefixes
    counts = None if prefixes is None else {"num_queries": prefixes.num_queries, "num_hits": prefixes.num_hits}
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_swapped": scheduler.num_swapped,
        "num_parked": scheduler.num_parked,
        "num_preemptions": scheduler.num_preemptions,
        "num_recomputed_tokens": scheduler.num_recomputed_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "admission_blocked_reason": scheduler.admission_blocked_reason,
        "prefix_cache": counts,
        "blocks": block_counts(cache.memory),
        "host_blocks": None if cache.host is None else block_counts(cache.host.pool),
    }


def pipeline(running: PipelineStatus, load: StageLoad | None, flow: FlowRates) -> dict[str, Any]:
    """Stages and channels with their counters, in order of the flow; shares of the last seconds from `load`.

    The rates of the channels in the last seconds are from `flow`.
    """
    edges = {edge.name: edge for edge in running.edges}
    shares = {} if load is None else load.shares()
    stages = {}
    for name, stage in running.stages.items():
        busy, blocked = shares.get(name, (0.0, 0.0))
        stages[name] = {
            "busy": round(busy, 4),
            "blocked": round(blocked, 4),
            "idle_s": round(stage.idle, 6),
            "busy_s": round(stage.busy, 6),
            "blocked_s": round(stage.blocked, 6),
            "num_restarts": stage.num_restarts,
            "num_dropped": stage.num_dropped,
            "last_progress_s": round(stage.last_progress_s, 3),
        }
    channels = {}
    for name, channel in running.channels.items():
        stats, edge = channel.stats, edges.get(name)
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


def request_row(engine: Engine, status: EngineStatus, outbox: RequestOutbox) -> dict[str, Any]:
    """One live request."""
    request = outbox.request
    sequences = status.sequences_of(request.first_sequence_id, request.num_sequences)
    stage, _ = engine.exit.locate(outbox) if engine.has_core else ("encode", False)
    num_prompt = outbox.num_prompt_tokens or (sequences[0].num_prompt if sequences else 0)
    slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
    times, state = outbox.times, _state(sequences, outbox)
    return adapter_of(status, outbox, state) | {
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
        "num_blocks": status.num_blocks_of(slots),
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
    stall, names = watchdog.stall, engine.pipeline.status().stages if with_stacks else ()
    stacks = [*task_stacks(engine.pipeline, only=names), *engine.pipeline.stacks_elsewhere] if with_stacks else []
    return {
        "stall": None
        if stall is None
        else {"name": stall.name, "reason": stall.reason, "num_waiting": stall.num_waiting},
        "num_stalls": watchdog.num_stalls,
        "stacks": {entry["task"]: entry["stack"] for entry in stacks if entry.get("task") in names},
        "lag": histogram_tree(watchdog.meter.lag_us),
        "pause": histogram_tree(watchdog.meter.pause_us),
    }


def histogram_tree(of: LatencyHistogram) -> dict[str, Any]:
    """A histogram for the page, which reads quantiles from `sketch`."""
    sketch = {str(place): count for place, count in of.sketch.copy().items()}
    return {"bounds_us": of.bounds, "counts": list(of.counts), "total_us": of.total, "sketch": sketch, "growth": GROWTH}


def block_owners(engine: Engine, status: EngineStatus) -> BlockOwners | None:
    """The blocks of the engine; None if the status has none."""
    blocks = None if status.core is None else status.core.cache.blocks
    return None if blocks is None else BlockOwners(blocks, status.owners, engine.info.block_size)


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
    for config in (engine.config, service.config):
        kind: Kind = type(config)
        for field in (field for fields in groups_of(kind).values() for field in fields):
            value = effective.get(field.name, getattr(config, field.name))
            shown = HIDDEN if field.info.is_secret and value else value
            source = service.sources.get(field.name, "")
            row = {"group": field.info.group, "name": field.name, "value": shown}
            rows.append({**row, "source": source, "help": field.info.help})
    return rows


def is_found(search: str, outbox: RequestOutbox) -> bool:
    """Whether a request has the text in its id or in the name of its adapter."""
    adapter = outbox.request.adapter
    return search in outbox.request_id or (adapter is not None and search in adapter.name)


def _state(sequences: list[SequenceRow], outbox: RequestOutbox) -> str:
    """The state of a request; of several choices, that of the most advanced one."""
    if any(choice.is_parked for choice in outbox.choices):
        return "parked"
    states = {sequence.state.value for sequence in sequences}
    for state in ("running", "swapped", "preempted", "parked", "waiting"):
        if state in states:
            return state
    return "finishing" if outbox.has_started else "arriving"


def block_counts(pool: PoolStatus) -> dict[str, int]:
    """The blocks of one pool by state; shared blocks are in use too."""
    return {
        "num_blocks": pool.num_blocks,
        "free": pool.num_free,
        "in_use": pool.num_in_use,
        "shared": pool.num_shared,
        "cached": pool.num_cached,
        "quarantined": pool.num_quarantined,
    }
