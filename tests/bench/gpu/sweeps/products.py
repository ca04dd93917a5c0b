"""Times products of few rows with many tilings, beside PyTorch's: whether `few_rows` pays, and with which tilings.

    python -m tests.bench.gpu.sweeps.products [--limit-s 100] [--json FILE] [--only NAME]... [--seed N] [--workers 14]
        [--rows 1,16,32,64] [--dry]

Candidates are compiled first, by several processes, as that takes longer than all the timing; then each is held
against float64, once, and timed in two ways. `alone_us` is one launch in a graph of its own with a cold cache, and has
what two events take in it. `chained_us` is a launch's share of a graph of many, one after another, each with a weight
of its own, so that none is in a cache: as in a step, the end of one and the beginning of the next are in it, and what
events take is not. The fastest are tried once more with `starts_early`, where these two may overlap.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from millrace.kernels.triton import layers as triton_layers
from tests.bench.gpu.few_rows import SMALLEST_BLOCK, Tiling, activated, add_product, join_counters, product
from tests.bench.gpu.floors import GPU_SHAPES, H200
from tests.bench.gpu.place import TINY
from tests.bench.gpu.sweeps.product_candidates import Case, Job, Product, products_of, tilings_of
from tests.bench.gpu.sweeps.sweeping import Sweeping, command_line, run
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.timing import Clock
from tests.bench.gpu.trials.trial import Tensors, far

ROWS, DRY_ROWS = "1,16,32,64", "2"
CHAIN_BYTES = 768 << 20  # of weights: many times an L2 cache
NUM_CHAINS = 7
NUM_EARLY = 3  # of the best, which are tried with `starts_early`
NUM_SHOWN = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("tests.bench.gpu.sweeps.products", "Time products of few rows with many tilings on a GPU.")
    parser.add_argument("--rows", help=f"default: {ROWS}; {DRY_ROWS} in a dry run")
    return run(parser, argv, sweep)


def sweep(sweeping: Sweeping) -> None:
    """Tells the times of each case, and then those of the best that start early."""
    place = sweeping.place
    num_rows = (sweeping.options.rows or (DRY_ROWS if place.is_dry else ROWS)).split(",")
    models = {"tiny": TINY} if place.is_dry else GPU_SHAPES
    products = [found for name, model in models.items() for found in products_of(name, Widths.of(model))]
    cases = [Case(found, int(rows)) for found in products for rows in num_rows if sweeping.is_chosen(found.name)]
    candidates = {case: [Job(case, tiling) for tiling in tilings_of(case, is_dry=place.is_dry)] for case in cases}
    best = timed(sweeping, candidates)
    if not place.is_dry:  # the interpreter knows no such launches
        early = {case: [Job(case, tiling._replace(starts_early=True)) for tiling in best[case]] for case in best}
        timed(sweeping, early)


def timed(sweeping: Sweeping, candidates: dict[Case, list[Job]]) -> dict[Case, list[Tiling]]:
    """Tells the times of each case, and returns its best tilings."""
    device, dtype = sweeping.place.device, sweeping.place.dtype
    draw = torch.Generator(device).manual_seed(sweeping.place.seed)
    working, best = sweeping.compiled(candidates, partial(compile_one, device, dtype)), {}
    for case in sweeping.in_time(working):
        inputs = Inputs.zeros(case, device, dtype)
        inputs.fill(draw)
        rows = rows_of(sweeping, inputs, [Job(case, None), *working[case]])
        rows.sort(key=lambda row: (row["tiling"] is not None, bool(row["wrong"]), row["chained_us"]))
        floor_us = 1e6 * inputs.weight.numel() * inputs.weight.itemsize / H200.bytes_per_s
        show(case, rows, floor_us)
        for row in rows:
            for sentence in row["wrong"]:
                sweeping.complain(f"{Job(case, row['tiling'])}: {sentence}")
        sweeping.tell({"case": str(case), "floor_us": floor_us, "rows": rows})
        best[case] = [row["tiling"] for row in rows if row["tiling"] is not None and not row["wrong"]][:NUM_EARLY]
    return best


def rows_of(sweeping: Sweeping, inputs: Inputs, jobs: list[Job]) -> list[dict[str, Any]]:
    """One for each candidate that works."""
    rows = []
    weights = chain(inputs.weight)
    before, want = inputs.residual.clone(), inputs.exact()
    for job in sweeping.in_time(jobs):
        inputs.residual.copy_(before)
        launch = partial(inputs.launch, job.tiling)
        with sweeping.trying(job):
            complaints = wrong(inputs, job.tiling, before, want)
            alone_us = sweeping.clock.us(partial(launch, inputs.weight))
            times = {"alone_us": alone_us, "chained_us": chained_us(launch, weights, sweeping.clock)}
            rows.append({"tiling": job.tiling, "wrong": complaints, **times})
    return rows


def show(case: Case, rows: list[dict[str, Any]], floor_us: float) -> None:
    """PyTorch's, and the fastest."""
    print(f"# {case}, floor {floor_us:.2f} us: alone, chained, share of the floor")
    for row in [row for row in rows if not row["wrong"]][: 1 + NUM_SHOWN]:
        name = "pytorch" if row["tiling"] is None else str(tuple(row["tiling"]))
        times = f"{row['alone_us']:8.2f} {row['chained_us']:8.2f}"
        print(f"  {times}  {floor_us / row['chained_us']:.3f}  {name}")
    sys.stdout.flush()


def compile_one(device: torch.device, dtype: torch.dtype, job: Job) -> None:
    """Launches it once, so that Triton's cache has it."""
    inputs = Inputs.zeros(job.case, device, dtype)
    inputs.launch(job.tiling, inputs.weight)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


if __name__ == "__main__":
    raise SystemExit(main())
