"""Where a step's time goes: its kernels by name, from torch's profiler, over decode steps that are replayed and prompts
that are launched.

A row for each of the kernels that take longest, one for the others together, and one for the step, measured without the
profiler. `share` is of the kernels' time, copies among them, those beside kernels, too; what `kernels_us` lacks of
`step_us` is about what lies between kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from millrace.stages.backends.cuda.step_submission import StepSubmitter
from millrace.stages.messages import StepGrant
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.parts.steps import (
    BLOCK_SIZE,
    TINY_LOADS,
    Subject,
    decode_grants,
    prompt_grants,
    run_steps,
    streams_of,
)
from tests.bench.gpu.place import TINY, Place

LOADS = ((1, 1024), (64, 1024), (256, 1024))  # rows, tokens of context
PROMPTS, TINY_PROMPTS = (512, 2048, 8192), (9, 70)
DECODE_COUNTS, PROMPT_COUNTS, TINY_COUNTS = (5, 20, 10), (2, 5, 3), (1, 1, 1)  # steps to warm up, timed, profiled
NUM_NAMED = 12
MOST_LETTERS = 120  # of a kernel's name: those of templates are longer


def run_small(place: Place) -> None:
    """The part `where-0.6b`."""
    run(place, "qwen3-0.6b")


def run_large(place: Place) -> None:
    """The part `where-8b`."""
    run(place, "llama-3.1-8b")


def run(place: Place, shape: str) -> None:
    """Tells rows for each load, with graphs, and for each prompt, without."""
    loads, prompts = (TINY_LOADS, TINY_PROMPTS) if place.is_dry else (LOADS, PROMPTS)
    decode, prompt = (TINY_COUNTS, TINY_COUNTS) if place.is_dry else (DECODE_COUNTS, PROMPT_COUNTS)
    sizes = [*((num_rows, context + sum(decode)) for num_rows, context in loads), (1, max(prompts) + 1)]
    subject = Subject(TINY if place.is_dry else GPU_SHAPES[shape], place.device, sizes, BLOCK_SIZE, max(prompts))
    name = "tiny" if place.is_dry else shape
    line = subject.line(streams_of(place), time.perf_counter, is_eager=False)
    for num_rows, context in loads:
        grants = decode_grants(subject, num_rows, context, sum(decode))
        tell(place, {"shape": name, "step": f"{num_rows} x 1 of {context}"}, line, grants, decode)
    line = subject.line(streams_of(place), time.perf_counter, is_eager=True)
    for num_tokens in prompts:
        grants = prompt_grants(subject, num_tokens, sum(prompt))
        tell(place, {"shape": name, "step": f"prompt of {num_tokens}"}, line, grants, prompt)


def tell(
    place: Place, which: dict[str, Any], line: StepSubmitter, grants: list[StepGrant], counts: tuple[int, int, int]
) -> None:
    """Tells the rows of one kind of step."""
    num_warm, num_timed, num_profiled = counts
    num_replayed = line.graphs.num_replayed
    step_us, _, submit_us = run_steps(line, grants[: num_warm + num_timed], time.perf_counter)
    rows = rows_of(profiled(place, line, grants[-num_profiled:]), num_profiled)
    if not rows:
        place.complain(f"the profiler saw no kernel of {which['shape']}, {which['step']}")
    whole = {
        "has_graphs": line.graphs.num_replayed > num_replayed,
        "step_us": statistics.median(step_us[num_warm:]),
        "submit_us": statistics.median(submit_us[num_warm:]),
        "kernels_us": sum(row["us"] for row in rows),
    }
    place.tell(which | whole)
    for row in rows:
        place.tell(which | row)


def profiled(place: Place, line: StepSubmitter, grants: list[StepGrant]) -> Iterator[tuple[str, float]]:
    """Name and microseconds of each kernel and copy; on a CPU, of each operation that no other one called."""
    activity = ProfilerActivity.CPU if place.is_dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        run_steps(line, grants, time.perf_counter)
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
