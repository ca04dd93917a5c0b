"""The part `steps-lora`: decode steps with LoRA adapters in graphs, beside the same steps without.

One model and cache. One line of steps has no adapters, the other has all slots filled with adapters of RANK for all
linears; blocks of steps alternate, and `paired.py` says how they are compared. A step without adapter rows is also
timed in the graph that serves them, which an engine never does: that is what a list without tiles costs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from millrace.kernels import kernel_set
from millrace.model.decoder.lora_slots import LoraSlots
from millrace.stages.messages import StepGrant
from tests.bench.gpu.paired import order, paired_ratio
from tests.bench.gpu.parts.grants import decode_grants
from tests.bench.gpu.parts.steps import DRY, LARGE, LEAST_S, Load, subject_of
from tests.bench.gpu.parts.subject import StepLine, Subject, Times, streams_of
from tests.bench.gpu.place import Place

NUM_PAIRS, NUM_STEPS, NUM_WARM = 4, 20, 5
DRY_COUNTS = (2, 2, 1)
RANK, MOST_ADAPTERS = 16, 32
SHAPE = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Decode rows that have `num_adapters` adapters in turn; 0: none has one, in the graph for those that have."""

    num_rows: int
    num_adapters: int
    context: int = 1024

    @property
    def name(self) -> str:
        """As the row of the part."""
        return f"{self.num_rows} x 1 of {self.context}, {self.num_adapters} adapters"

    def grants(self, subject: Subject, num_steps: int) -> list[StepGrant]:
        """The plans of the steps."""
        first, *rest = decode_grants(subject, self.num_rows, self.context, num_steps)
        started = tuple(
            replace(one, adapter_slot=1 + row % self.num_adapters if self.num_adapters else 0)
            for row, one in enumerate(first.started)
        )
        return [replace(first, started=started), *rest]


LOADS = (AdapterLoad(64, 8), AdapterLoad(1, 1), AdapterLoad(64, 32), AdapterLoad(64, 0), AdapterLoad(1, 0))
DRY_LOADS = (AdapterLoad(3, 2, 40), AdapterLoad(2, 0, 40))


def run(place: Place) -> None:
    """Tells a row for each load, and its time over that of the step without adapters."""
    loads, counts = (DRY_LOADS, DRY_COUNTS) if place.is_dry else (LOADS, (NUM_PAIRS, NUM_STEPS, NUM_WARM))
    subject = subject_of(place, SHAPE, DRY if place.is_dry else LARGE)
    num_rows = [4] if place.is_dry else sorted({load.num_rows for load in loads})
    num_rows = [min(rows, subject.max_num_seqs) for rows in num_rows]
    slots = filled(subject, 2 if place.is_dry else MOST_ADAPTERS)
    place.tell({"name": "slots", "bytes": slots.num_bytes, "num_slots": len(slots._numbers), "rank": RANK})
    lines = {
        name: subject.line(streams_of(place), time.perf_counter, num_rows=num_rows, slots=chosen)
        for name, chosen in (("none", None), ("adapters", slots))
    }
    for load in place.in_time(loads, LEAST_S if not place.is_dry else 0.0):
        name = f"{'tiny' if place.is_dry else SHAPE} {load.name}"
        if place.is_chosen(name):
            with place.trying(name):
                compare(place, name, subject, slots, lines, load, counts)


def filled(subject: Subject, num_slots: int) -> LoraSlots:
    """Slots with drawn numbers, each of the largest rank in all linears."""
    kernels = kernel_set.load_lora("torch" if subject.device.type == "cpu" else "triton")
    slots = LoraSlots(subject.spec, subject.weights, kernels, num_slots, RANK, subject.max_step_tokens)
    slots._numbers.normal_(0.0, 0.02)
    slots._ranks.fill_(RANK)
    return slots


def compare(
    place: Place,
    name: str,
    subject: Subject,
    slots: LoraSlots,
    lines: dict[str, StepLine],
    load: AdapterLoad,
    counts: tuple[int, int, int],
) -> None:
    """One load, by the line without adapters and the line with."""
    num_pairs, num_steps, num_warm = counts
    plans = {each: iter(load.grants(subject, num_warm + num_pairs * num_steps)) for each in lines}
    found: dict[str, list[Times]] = {each: [] for each in lines}
    for each, line in lines.items():
        line.is_always_adapted = each == "adapters"
        line.run([next(plans[each]) for _ in range(num_warm)], time.perf_counter)
    names = list(lines)
    for letter in order(num_pairs):
        each = names["AB".index(letter)]
        found[each].append(lines[each].run([next(plans[each]) for _ in range(num_steps)], time.perf_counter))
    blocks = {each: [times.step_us for times in found[each]] for each in names}
    floor_us = Load(name, load.num_rows, load.context).floor_us(place, subject.shape)
    floor_us += 1e6 * load.num_adapters * slots.num_bytes / len(slots._numbers) / place.card.bytes_per_s
    row: dict[str, Any] = {
        "name": name,
        "step_us": statistics.median(us for block in blocks["adapters"] for us in block),
        "floor_us": floor_us,
        "without_us": statistics.median(us for block in blocks["none"] for us in block),
        "has_graphs": all(times.num_replayed == len(times.step_us) for each in names for times in found[each]),
    }
    place.tell(row)
    ratio = paired_ratio(blocks["none"], blocks["adapters"], place.seed)
    place.tell({"name": f"{name}: over none", "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high})
