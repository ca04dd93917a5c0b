"""The part `card`: what the card does at its best, and what a launch costs in a graph, with its event, and early."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from millrace.kernels.triton.launch import early_launch, start_early
from tests.bench.gpu.floors import CARDS
from tests.bench.gpu.place import Place

COPIED_BYTES, DRY_COPIED_BYTES = 2 << 30, 1 << 16
WIDTH, DRY_WIDTH = 8192, 32
NUM_NODES, NUM_TIMED = 200, 7


@triton.jit
def _empty_kernel(number, IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    start_early(IS_EARLY)
    tl.store(number, 1)


def run(place: Place) -> None:
    """Tells the ceilings, and then the times of launches."""
    with place.trying("ceilings"):
        place.tell(ceilings(place) | {"is_in_table": any(key in place.name for key in CARDS)})
    with place.trying("launches"):
        place.tell(launches(place))


def ceilings(place: Place) -> dict[str, Any]:
    """Of a copy, reads and writes together, and of a product of bfloat16 matrices of random numbers."""
    num_bytes, width = (DRY_COPIED_BYTES, DRY_WIDTH) if place.is_dry else (COPIED_BYTES, WIDTH)
    source = torch.zeros(num_bytes, dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    copy_s = seconds(place, partial(target.copy_, source))
    del source, target
    a, b = (torch.randn(width, width, device=place.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product_s = seconds(place, partial(torch.mm, a, b, out=out))
    return {"name": "ceilings", "bytes_per_s": 2 * num_bytes / copy_s, "flops_per_s": 2 * width**3 / product_s}


def launches(place: Place) -> dict[str, Any]:
    """Microseconds of a node of a graph, launched plainly and early, and of a graph of one with its two events."""
    number = torch.zeros(1, dtype=torch.int32, device=place.device)
    plain = {"IS_EARLY": False}
    kinds = {"node_us": plain, "early_node_us": early_launch(place.device)}
    told: dict[str, Any] = {"name": "launches"}
    for name, options in kinds.items():
        few, many = (
            seconds(place, graphed(place, lambda options=options: _empty_kernel[(1,)](number, **options), count))
            for count in (1, 2 if place.is_dry else NUM_NODES)
        )
        told[name] = 1e6 * (many - few) / ((1 if place.is_dry else NUM_NODES) - 1 or 1)
        told.setdefault("graph_of_one_us", 1e6 * few)
    return told


def graphed(place: Place, launch: Callable[[], object], count: int) -> Callable[[], object]:
    """So many launches as one; without a GPU, one after another."""
    if place.is_dry:
        return lambda: [launch() for _ in range(count)]
    launch()
    torch.cuda.synchronize(place.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    return graph.replay


def seconds(place: Place, work: Callable[[], object]) -> float:
    """A median, between two events; without a GPU, of the host."""
    found = []
    for _ in range(2 if place.is_dry else NUM_TIMED + 1):
        if place.is_dry:
            began_s = time.perf_counter()
            work()
            found.append(time.perf_counter() - began_s)
            continue
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        done.record()
        done.synchronize()
        found.append(1e-3 * began.elapsed_time(done))
    return statistics.median(found[1:])
