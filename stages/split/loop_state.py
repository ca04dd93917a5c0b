"""The state of a step loop, as the process that runs it reports it."""

from __future__ import annotations

from typing import Any

from ...runtime.health.flight_recorder import task_stacks, thread_stacks
from ...runtime.pipeline import Pipeline
from ..engine.engine_status import CoreReport
from ..engine.read_status import read_core
from ..engine.wiring import CoreStages


def moved(pipeline: Pipeline, core: CoreStages) -> tuple[object, ...]:
    """A value that changes whenever the reported state does."""
    runners = pipeline.runners.values()
    moments = [(runner.last_progress_s, runner.is_busy, runner.num_restarts) for runner in runners]
    depths = [len(channel) for channel in pipeline.channels.values()]
    return (*moments, *depths, len(core.schedule.scheduler.sequences))


def report_of(pipeline: Pipeline, core: CoreStages, entry: str, *, with_blocks: bool) -> CoreReport:
    """The state, with all sequences. The channel `entry` is counted where its items come from."""
    status = pipeline.status()
    counted_here = [channel for name, channel in status.channels.items() if name != entry]
    found = read_core(core, with_sequences=True, with_blocks=with_blocks)
    return CoreReport(found, list(status.stages.values()), counted_here)


def stacks_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The stacks of the stages' tasks, and of the threads."""
    stacks = [*task_stacks(pipeline, only=pipeline.runners), *thread_stacks()]
    return [stack | {"process": "engine"} for stack in stacks]
