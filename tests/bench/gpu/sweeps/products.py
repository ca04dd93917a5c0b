"""The part `products`: products of few rows in many forms, beside the library's, and a table of the best.

Each form is held against float64, once, and timed as in a step: `us` is a launch's share of a graph of many, one after
another, each with a weight of its own, so that none is in a cache; the end of one and the beginning of the next are in
it, and what events take is not. The library's is composed of the launches that a step has without forms.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import silu

from millrace.kernels.layout.products import FewRows, RowNorm, num_counters
from millrace.kernels.tilings.products import LIBRARY, ProductForm, ProductShape
from millrace.kernels.tilings.tables import write_table
from millrace.kernels.triton.products import gated_linear, linear_add, norm_linear
from millrace.model.decoder.linear import Linear
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.sweeps.attention import TABLE
from tests.bench.gpu.sweeps.product_candidates import Product, ProductCase, forms_of, products_of
from tests.bench.gpu.trials import oracle
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.timing import Clock, clock_of
from tests.bench.gpu.trials.trial import Tensors, far

ROWS, DRY_ROWS = (1, 4, 16, 64, 256, 8, 32), (3,)  # what decides most first
CHAIN_BYTES = 768 << 20  # of weights: many times an L2 cache
NUM_CHAINS = 5
LEAST_S = 0.5  # a case takes
EPS = 1e-6
Best = list[tuple[ProductShape, ProductForm, float]]


def run(place: Place) -> None:
    """Tells a row for each form, and one for the best of each case, which goes into the table."""
    best: Best = []
    for case in place.in_time(cases_of(place), LEAST_S):
        with place.trying(case):
            found = sweep(place, case)
            if found is not None:
                best.append((case.shape, *found))
                tabulate(place, best)


def tabulate(place: Place, best: Best) -> None:
    """The table is whole after each case."""
    if place.out is not None and place.dtype == torch.bfloat16:
        measured = f"{date.today().isoformat()}, torch {torch.__version__}, triton {triton.__version__}"
        write_table(place.out / TABLE, place.name, measured, {"product": best})


def cases_of(place: Place | None) -> Iterator[ProductCase]:
    """Those of few rows first. None: of a GPU, as they are compiled."""
    is_dry = place is not None and place.is_dry
    models = {"tiny": TINY} if is_dry else GPU_SHAPES
    for num_rows in DRY_ROWS if is_dry else ROWS:
        for name, model in models.items():
            for found in products_of(name, Widths.of(model)):
                case = ProductCase(found, num_rows)
                if place is None or place.is_chosen(str(case)):
                    yield case


def sweep(place: Place, case: ProductCase) -> tuple[ProductForm, float] | None:
    """One case: its best form, with its time."""
    inputs = Inputs.zeros(case.product, case.num_rows, place.device, place.dtype)
    inputs.fill(torch.Generator(place.device).manual_seed(place.seed))
    floor_us = 1e6 * inputs.weight.numel() * inputs.weight.itemsize / place.card.bytes_per_s
    weights, clock = chain(inputs.weight), clock_of(place.device)
    before, want = inputs.residual.clone(), inputs.exact()
    found: list[tuple[float, ProductForm]] = []
    for form in [LIBRARY, *forms_of(case, is_dry=place.is_dry)]:
        name = f"{case} {described(form)}"
        with place.trying(name):
            inputs.residual.copy_(before)
            if complaints := wrong(inputs, form, before, want):
                place.complain(f"{name}: {complaints[0]}")
                continue
            us = chained_us(inputs, form, weights, clock)
            found.append((us, form))
            place.tell({"name": name, "us": us, "floor_us": floor_us, "is_shown": False})
    if not found:
        return None
    us, form = min(found, key=lambda each: each[0])
    library_us = next((us for us, form in found if form is LIBRARY), None)
    row = {"name": str(case), "us": us, "floor_us": floor_us, "library_us": library_us, "form": described(form)}
    place.tell(row)
    return form, us


def described(form: ProductForm) -> str:
    """`split 16x64x128 /2, 4 warps, 4 stages`."""
    if form is LIBRARY:
        return "library"
    splits = f" /{form.num_splits}" if form.num_splits > 1 else ""
    more = ", swapped" * form.is_swapped + ", norm inside" * form.fuses_norm
    sizes = f"{form.block_m}x{form.block_n}x{form.block_k}"
    return f"{form.form} {sizes}{splits}, {form.num_warps} warps, {form.num_stages} stages{more}"


# ---- one case -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Tensors of a product, and its launches."""

    product: Product
    x: Tensor  # [M, K]
    weight: Tensor  # [N, K], or [2N, K] if gated
    residual: Tensor  # [M, N]
    norm: RowNorm | None

    @classmethod
    def zeros(cls, of: Product, num_rows: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        dims = ((num_rows, of.num_inner), (of.num_halves * of.num_outputs, of.num_inner), (num_rows, of.num_outputs))
        x, weight, residual = (torch.zeros(dim, dtype=dtype, device=device) for dim in dims)
        scale = torch.ones(of.num_inner, dtype=dtype, device=device)
        return cls(of, x, weight, residual, RowNorm(kind="rms", eps=EPS, weight=scale) if of.has_norm else None)

    def fill(self, draw: torch.Generator) -> None:
        for tensor in (self.x, self.weight, self.residual):
            tensor.normal_(generator=draw)
        self.weight.mul_(self.product.num_inner**-0.5)

    def counters(self, form: ProductForm, count: int = 1) -> list[Tensor | None]:
        """Zeros of so many launches, in one tensor; None where the form needs none."""
        size = num_counters(((len(self.x), form),), self.product.num_outputs)
        if not size:
            return [None] * count
        return list(torch.zeros(count, size, dtype=torch.int32, device=self.x.device))

    def launch(self, form: ProductForm, weight: Tensor, counters: Tensor | None) -> Tensors:
        """In that form. Counters have to be zeros, as at the begin of a step."""
        few = None if form is LIBRARY else FewRows(weight, None, ((len(self.x), form),), counters)
        linear = Linear(weight)
        if self.product.kind == "gated":
            return {"out": gated_linear(self.x, self.norm, linear, "silu", few=few)}
        if self.product.kind == "add":
            return {"out": linear_add(self.residual, self.x, linear, few)}
        return {"out": norm_linear(self.x, self.norm, linear, few)}

    def exact(self) -> Tensor:
        """What `launch` gives, in float64 but for what is rounded in between."""
        x = self.x.double()
        if self.norm is not None:
            assert self.norm.weight is not None
            x = oracle.rms_norm(self.x, self.norm.weight, EPS).to(self.x.dtype).double()
        sums = x @ self.weight.double().t()
        if self.product.kind == "add":
            return self.residual.double() + sums
        if self.product.kind == "gated":
            gate, up = sums.to(self.x.dtype).double().chunk(2, dim=1)
            return silu(gate) * up
        return sums


def wrong(inputs: Inputs, form: ProductForm, before: Tensor, want: Tensor) -> list[str]:
    """What is wrong with a launch, in sentences; and with the second, which has to give the same bits."""
    first, second = inputs.counters(form, 2)
    got = inputs.launch(form, inputs.weight, first)["out"].clone()
    found = list(far("the result", got, want))
    inputs.residual.copy_(before)
    if not torch.equal(inputs.launch(form, inputs.weight, second)["out"], got):
        found.append("a second launch gives other bits")
    return found


def chain(weight: Tensor) -> list[Tensor]:
    """It, and as many copies as make CHAIN_BYTES; on a CPU one."""
    num_weights = 2 if weight.device.type == "cpu" else max(2, -(-CHAIN_BYTES // (weight.numel() * weight.itemsize)))
    return [weight, *(weight.clone() for _ in range(num_weights - 1))]


def chained_us(inputs: Inputs, form: ProductForm, weights: list[Tensor], clock: Clock) -> float:
    """Of one launch among many. All their counters are one tensor, which is made zero before them, as in a step."""
    counters = inputs.counters(form, len(weights))
    base = counters[0]._base if counters[0] is not None else None

    def launches() -> Tensors:
        if base is not None:
            base.zero_()
        return [inputs.launch(form, *each) for each in zip(weights, counters, strict=True)][-1]

    if weights[0].device.type == "cpu":
        return clock.us(launches) / len(weights)
    return graph_us(launches) / len(weights)


def graph_us(launches: Callable[[], object]) -> float:
    """A median of replays, one after another."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    times: list[float] = []
    Event: Any = torch.cuda.Event
    for _ in range(NUM_CHAINS):
        began, done = (Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(1000.0 * began.elapsed_time(done))
    return statistics.median(times[1:])


def compile_form(case: ProductCase, form: ProductForm) -> None:
    """Launches it on meta tensors, for the processes that compile."""
    inputs = Inputs.zeros(case.product, case.num_rows, torch.device("meta"), torch.bfloat16)
    (counters,) = inputs.counters(form)
    inputs.launch(form, inputs.weight, counters)
