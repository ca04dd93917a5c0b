"""The part `where`: the kernels of a step by name, from torch's profiler, over steps that are replayed.

A row for each of the kernels that take longest, one for the others together, and one for the step, measured without the
profiler. `share` is of the kernels' time, copies among them, those beside kernels, too; what `kernels_us` lacks of
`us` is about what lies between kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from millrace.stages.messages import StepGrant
from tests.bench.gpu.parts import steps
from tests.bench.gpu.parts.steps import Load
from tests.bench.gpu.parts.subject import StepLine
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.choices import configurations

SHAPE = "qwen3-0.6b"
LOADS = ("1 x 1 of 1024", "256 x 1 of 1024", "prompt of 2048")  # of those of `steps`
COUNTS, DRY_COUNTS = (3, 10, 5), (1, 1, 1)  # steps to warm up, timed, profiled
NUM_NAMED = 12
MOST_LETTERS = 120  # of a kernel's name: those of templates are longer
LEAST_S = 2.0


def run(place: Place) -> None:
    """With the model of `steps`, where that part left it, and the best configuration."""
    loads = steps.DRY[:1] if place.is_dry else [load for load in steps.SMALL if load.name in LOADS]
    counts = DRY_COUNTS if place.is_dry else COUNTS
    subject = steps.subject_of(place, SHAPE, steps.DRY if place.is_dry else steps.SMALL)
    line = steps.line_of(place, subject, configurations(place)[-1], loads)
    for load in place.in_time(loads, 0.0 if place.is_dry else LEAST_S):
        with place.trying(load.name):
            tell(place, load, line, load.grants(subject, sum(counts)), counts)


def tell(place: Place, load: Load, line: StepLine, grants: list[StepGrant], counts: tuple[int, int, int]) -> None:
    """Tells the rows of one kind of step."""
    num_warm, num_timed, num_profiled = counts
    times = line.run(grants[: num_warm + num_timed], time.perf_counter)
    rows = rows_of(profiled(place, line, grants[-num_profiled:]), num_profiled)
    if not rows:
        place.complain(f"the profiler saw no kernel of {load.name}")
    name = f"{'tiny' if place.is_dry else SHAPE} {load.name}"
    kernels_us = sum(row["us"] for row in rows)
    num_launches = sum(row["count"] for row in rows)
    us = statistics.median(times.step_us[num_warm:])
    place.tell({"name": name, "us": us, "kernels_us": kernels_us, "num_kernels": num_launches})
    for row in rows:
        place.tell({"name": name, **row})


def profiled(place: Place, line: StepLine, grants: list[StepGrant]) -> Iterator[tuple[str, float]]:
    """Name and microseconds of each kernel and copy; on a CPU, of each operation that no other one called."""
    activity = ProfilerActivity.CPU if place.is_dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        line.run(grants, time.perf_counter)
        if not place.is_dry:
            torch.cuda.synchronize(place.device)
    for event in profiler.events() or ():
        if event.cpu_parent is None if place.is_dry else event.device_type == DeviceType.CUDA:
            yield event.name, event.time_range.elapsed_us()


def rows_of(launches: Iterable[tuple[str, float]], num_steps: int) -> list[dict[str, Any]]:
    """Of a step: the kernels that take longest, the others together, and the share of each."""
    durations: dict[str, list[float]] = {}
    for name, us in launches:
        durations.setdefault(name, []).append(us)
    ranked = sorted(durations, key=lambda name: -sum(durations[name]))
    groups = [(name[:MOST_LETTERS], durations[name]) for name in ranked[:NUM_NAMED]]
    if others := ranked[NUM_NAMED:]:
        groups.append((f"{len(others)} others", [us for name in others for us in durations[name]]))
    total_us = sum(sum(each) for each in durations.values())
    return [
        {
            "kernel": title,
            "count": len(each) / num_steps,
            "us": sum(each) / num_steps,
            "share": sum(each) / total_us,
        }
        for title, each in groups
    ]
