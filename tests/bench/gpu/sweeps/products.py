"""The part `products`: products of few rows with many tilings, beside PyTorch's.

Each candidate is held against float64, once, and timed as in a step: `us` is a launch's share of a graph of many, one
after another, each with a weight of its own, so that none is in a cache; the end of one and the beginning of the next
are in it, and what events take is not. The fastest are tried once more with `starts_early`, where these two may
overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from millrace.kernels.triton import layers as triton_layers
from tests.bench.gpu.few_rows import SMALLEST_BLOCK, Tiling, activated, add_product, join_counters, product
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.sweeps.product_candidates import Case, Product, products_of, tilings_of
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.timing import Clock, clock_of
from tests.bench.gpu.trials.trial import Tensors, far

ROWS, DRY_ROWS = (1, 4, 16, 64, 256), (3,)
CHAIN_BYTES = 768 << 20  # of weights: many times an L2 cache
NUM_CHAINS = 5
NUM_GUESSES = 12
NUM_EARLY = 3  # of the best, which are tried with `starts_early`
LEAST_S = 0.5  # a case takes


def run(place: Place) -> None:
    """Tells a row for each candidate, and one for the best of each case."""
    for case in place.in_time(cases_of(place), LEAST_S):
        with place.trying(case):
            sweep(place, case)


def cases_of(place: Place) -> Iterator[Case]:
    models = {"tiny": TINY} if place.is_dry else GPU_SHAPES
    for name, model in models.items():
        for num_rows in DRY_ROWS if place.is_dry else ROWS:
            for found in products_of(name, Widths.of(model)):
                if place.is_chosen(f"{Case(found, num_rows)}"):
                    yield Case(found, num_rows)


def sweep(place: Place, case: Case) -> None:
    """One case."""
    inputs = Inputs.zeros(case, place.device, place.dtype)
    inputs.fill(torch.Generator(place.device).manual_seed(place.seed))
    floor_us = 1e6 * inputs.weight.numel() * inputs.weight.itemsize / place.card.bytes_per_s
    weights, clock = chain(inputs.weight), clock_of(place.device)
    before, want = inputs.residual.clone(), inputs.exact()

    def timed(tilings: Sequence[Tiling | None]) -> list[tuple[float, Tiling | None]]:
        found = []
        for tiling in tilings:
            name = f"{case} {'pytorch' if tiling is None else tuple(tiling)}"
            with place.trying(name):
                inputs.residual.copy_(before)
                if complaints := wrong(inputs, tiling, before, want):
                    place.complain(f"{name}: {complaints[0]}")
                    continue
                us = chained_us(partial(inputs.launch, tiling), weights, clock)
                found.append((us, tiling))
                place.tell({"name": name, "us": us, "floor_us": floor_us, "is_shown": False})
        return found

    found = timed([None, *tilings_of(case, is_dry=place.is_dry)[:NUM_GUESSES]])
    best = sorted((us, tiling) for us, tiling in found if tiling is not None)[:NUM_EARLY]
    if not place.is_dry and torch.cuda.get_device_capability(place.device) >= (9, 0):
        found += timed([tiling._replace(starts_early=True) for _, tiling in best])
    shipped_us = next((us for us, tiling in found if tiling is None), None)
    us, tiling = min(found, key=lambda each: each[0])
    place.tell({"name": str(case), "us": us, "floor_us": floor_us, "pytorch_us": shipped_us, "tiling": tiling})


# ---- one case -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Tensors of a product, and its launches."""

    product: Product
    x: Tensor  # [M, K]
    weight: Tensor  # [N, K], or [2 N, K]
    residual: Tensor  # [M, N]
    counters: Tensor

    @classmethod
    def zeros(cls, case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
        of, num_rows = case.product, case.num_rows
        dims = ((num_rows, of.num_inner), (of.num_weights // of.num_inner, of.num_inner), (num_rows, of.num_outputs))
        x, weight, residual = (torch.zeros(dim, dtype=dtype, device=device) for dim in dims)
        return cls(of, x, weight, residual, join_counters(of.num_outputs, device, -(-num_rows // SMALLEST_BLOCK)))

    def fill(self, draw: torch.Generator) -> None:
        for tensor in (self.x, self.weight, self.residual):
            tensor.normal_(generator=draw)
        self.weight.mul_(self.product.num_inner**-0.5)

    def launch(self, tiling: Tiling | None, weight: Tensor) -> Tensors:
        """With that tiling, or PyTorch's."""
        shared = (self.x, weight, self.counters, tiling)
        if self.product.kind == "activated":
            return {
                "out": triton_layers.gated(linear(self.x, weight), "silu") if tiling is None else activated(*shared)
            }
        if self.product.kind == "add":
            if tiling is None:
                return {"out": self.residual.addmm_(self.x, weight.t())}
            return {"out": add_product(self.residual, *shared)}
        return {"out": linear(self.x, weight) if tiling is None else product(*shared)}

    def exact(self) -> Tensor:
        """What `launch` gives, in float64 but for what is rounded in between."""
        sums = self.x.double() @ self.weight.double().t()
        if self.product.kind == "add":
            return self.residual.double() + sums
        if self.product.kind == "activated":
            gate, up = sums.to(self.x.dtype).double().chunk(2, dim=1)
            return silu(gate) * up
        return sums


def wrong(inputs: Inputs, tiling: Tiling | None, before: Tensor, want: Tensor) -> list[str]:
    """What is wrong with a launch, in sentences; and with the second, which has to give the same bits."""
    got = inputs.launch(tiling, inputs.weight)["out"].clone()
    found = list(far("the result", got, want))
    inputs.residual.copy_(before)
    if tiling is not None and not torch.equal(inputs.launch(tiling, inputs.weight)["out"], got):
        found.append("a second launch gives other bits")
    if bool(inputs.counters.any()):
        found.append("counters are not 0 afterwards")
        inputs.counters.zero_()
    return found


def chain(weight: Tensor) -> list[Tensor]:
    """It, and as many copies as make CHAIN_BYTES; on a CPU one."""
    num_weights = 2 if weight.device.type == "cpu" else max(2, -(-CHAIN_BYTES // (weight.numel() * weight.itemsize)))
    return [weight, *(weight.clone() for _ in range(num_weights - 1))]


def chained_us(launch: Callable[[Tensor], Tensors], weights: list[Tensor], clock: Clock) -> float:
    """Of one launch among many."""
    if weights[0].device.type == "cpu":
        return clock.us(lambda: [launch(weight) for weight in weights][-1]) / len(weights)
    launch(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            launch(weight)
    times: list[float] = []
    Event: Any = torch.cuda.Event
    for _ in range(NUM_CHAINS):
        began, done = (Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(1000.0 * began.elapsed_time(done) / len(weights))
    return statistics.median(times[1:])
