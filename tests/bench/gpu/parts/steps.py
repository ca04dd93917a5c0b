"""The parts `steps`, `steps-8b`, `steps-fp8`: steps beside their floors, by two configurations in one process.

One model and cache, and a line of steps for each configuration. Blocks of steps alternate; `paired.py` says how they
are compared. Decode steps and prompts run as graphs, with other kinds of sampling, and with a prompt beside rows; one
prompt is launched kernel by kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.stages.backends.cuda.triton_chooser import PLAIN, TRUNCATED
from millrace.stages.messages import StepGrant
from tests.bench.gpu.floors import GPU_SHAPES, decode_floor_s, prefill_floor_s
from tests.bench.gpu.paired import order, paired_ratio
from tests.bench.gpu.parts.grants import LOGPROBS, TOP_P, decode_grants, draft_grants, mixed_grants, prompt_grants
from tests.bench.gpu.parts.subject import StepLine, Subject, Times, streams_of
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.sweeps.choices import Configuration, configurations

NUM_PAIRS, NUM_STEPS, NUM_WARM = 6, 20, 5  # blocks of each configuration, steps of each, steps that do not count
DRY_COUNTS = (2, 3, 1)
KINDS = (PLAIN, TRUNCATED)
LEAST_S = 3.0  # a load takes


@dataclass(frozen=True, slots=True)
class Load:
    """What a step has, and the least time that it can take."""

    name: str
    num_rows: int = 0
    context: int = 0
    num_prompt: int = 0  # tokens of a prompt, alone or beside the rows
    chunk: int = 0  # tokens of a step of it; 0: whole
    asked: dict[str, Any] = field(default_factory=dict)  # of the rows; greedy without
    num_drafts: int = 0  # of each row

    def grants(self, subject: Subject, num_steps: int) -> list[StepGrant]:
        if not self.num_rows:
            return prompt_grants(subject, self.num_prompt, num_steps, self.chunk)
        if self.num_drafts:
            return draft_grants(subject, self.num_rows, self.context, self.num_drafts, num_steps)
        if self.num_prompt:
            return mixed_grants(subject, self.num_rows, self.context, self.num_prompt, num_steps)
        return decode_grants(subject, self.num_rows, self.context, num_steps, self.asked or {"temperature": 0.0})

    def floor_us(self, place: Place, shape: dict[str, Any]) -> float:
        floor_s = prefill_floor_s(shape, self.num_prompt, place.card) if self.num_prompt else 0.0
        if self.num_rows:
            floor_s += decode_floor_s(shape, self.num_rows, self.context, place.card)  # drafts share what is read
        return 1e6 * floor_s

    @property
    def num_tokens(self) -> int:
        """Of a step, for its rate: answers' tokens, or those of a prompt alone."""
        return self.num_rows or self.num_prompt

    @property
    def steps_a_prompt(self) -> int:
        return -(-self.num_prompt // self.chunk) if self.chunk else 1


SMALL = (
    Load("256 x 1 of 1024", 256, 1024),
    Load("1 x 1 of 1024", 1, 1024),
    Load("64 x 1 of 1024", 64, 1024),
    Load("prompt of 8192, whole", num_prompt=8192),
    Load("prompt of 2048", num_prompt=2048),
    Load("64 x 1 of 8192", 64, 8192),
    Load("1 x 1 of 1024, top_p", 1, 1024, asked=TOP_P),
    Load("64 x 1 of 1024, top_p", 64, 1024, asked=TOP_P),
    Load("prompt of 512", num_prompt=512),
    Load("64 x 1 of 1024 and a prompt of 512", 64, 1024, num_prompt=512),
    Load("8 x 1 of 1024", 8, 1024),
    Load("16 x 1 of 1024, 3 drafts each", 16, 1024, num_drafts=3),
    Load("prompt of 8192, by 2048", num_prompt=8192, chunk=2048),
    Load("64 x 1 of 1024, logprobs", 64, 1024, asked=LOGPROBS),
)
LARGE = (
    Load("1 x 1 of 1024", 1, 1024),
    Load("256 x 1 of 1024", 256, 1024),
    Load("64 x 1 of 1024", 64, 1024),
    Load("prompt of 8192, whole", num_prompt=8192),
)
FP8 = (Load("256 x 1 of 1024", 256, 1024), Load("64 x 1 of 1024", 64, 1024))
DRY = (
    Load("3 x 1 of 40", 3, 40),
    Load("3 x 1 of 40, top_p", 3, 40, asked=TOP_P),
    Load("2 x 1 of 40, logprobs", 2, 40, asked=LOGPROBS),
    Load("prompt of 70, by 30", num_prompt=70, chunk=30),
    Load("2 x 1 of 40 and a prompt of 9", 2, 40, num_prompt=9),
    Load("2 x 1 of 40, 3 drafts each", 2, 40, num_drafts=3),
)
MIXED_GRAPHS = (512, 640, 2048)  # of the sizes that an engine captures, those that the loads are padded to


def run_small(place: Place) -> None:
    """The part `steps`."""
    run(place, "qwen3-0.6b", SMALL)


def run_large(place: Place) -> None:
    """The part `steps-8b`."""
    run(place, "llama-3.1-8b", LARGE)


def run_fp8(place: Place) -> None:
    """The part `steps-fp8`."""
    if not (place.is_dry or place.has_fp8):
        place.tell({"name": "fp8", "skipped": "the card has no e4m3"})
        return
    run(place, "qwen3-0.6b", FP8, is_fp8=not place.is_dry)


def run(place: Place, shape: str, loads: Sequence[Load], *, is_fp8: bool = False) -> None:
    """Tells a row for each load and configuration, and one for the ratio of the two."""
    loads = DRY if place.is_dry else loads
    counts = DRY_COUNTS if place.is_dry else (NUM_PAIRS, NUM_STEPS, NUM_WARM)
    subject = subject_of(place, shape, loads, is_fp8=is_fp8)
    pair = configurations(place)
    lines = {each.name: line_of(place, subject, each, loads) for each in pair}
    for load in place.in_time(loads, LEAST_S if not place.is_dry else 0.0):
        name = f"{'tiny' if place.is_dry else shape} {load.name}"
        if place.is_chosen(name):
            with place.trying(name):
                compare(place, name, subject, lines, load, counts)


def subject_of(place: Place, shape: str, loads: Sequence[Load], *, is_fp8: bool = False) -> Subject:
    """The model, which parts of one process share."""
    if shape not in place.shared:
        num_pairs, num_steps, num_warm = DRY_COUNTS if place.is_dry else (NUM_PAIRS, NUM_STEPS, NUM_WARM)
        more = num_warm + num_pairs * num_steps + 1
        sizes = [(each.num_rows, each.context + more + each.num_drafts) for each in loads]
        sizes += [(1, each.num_prompt + 1) for each in loads]
        sizes += [(each.num_rows + 8, 0) for each in loads if each.num_rows and each.num_prompt]
        most = max((each.num_prompt for each in loads), default=0) + max(each.num_rows for each in loads)
        model = TINY if place.is_dry else GPU_SHAPES[shape]
        place.shared[shape] = Subject(model, place.device, sizes, max_step_tokens=most, is_fp8=is_fp8)
    subject: Subject = place.shared[shape]
    return subject


def line_of(place: Place, subject: Subject, configuration: Configuration, loads: Sequence[Load]) -> StepLine:
    """With graphs for these loads. What it is captured with stays with it."""
    num_rows = sorted({4 if place.is_dry else load.num_rows for load in loads if load.num_rows and not load.num_drafts})
    num_verified = max(load.num_rows * (1 + load.num_drafts) if load.num_drafts else 0 for load in loads)
    num_rows = [min(rows, subject.max_num_seqs) for rows in num_rows]
    num_tokens = (64,) if place.is_dry else tuple(n for n in MIXED_GRAPHS if n <= subject.max_step_tokens)
    sizes: dict[str, Any] = {"num_rows": num_rows, "num_tokens": num_tokens, "kinds": KINDS}
    sizes["num_verified"] = num_verified
    return subject.line(streams_of(place), time.perf_counter, tilings=configuration.tilings, **sizes)


def compare(
    place: Place, name: str, subject: Subject, lines: dict[str, StepLine], load: Load, counts: tuple[int, int, int]
) -> None:
    """One load, by each configuration."""
    num_pairs, num_steps, num_warm = counts
    if not load.num_rows:
        num_steps = max(1, num_steps // 4)  # prompts take long
    per_step = load.steps_a_prompt
    plans: dict[str, Iterator[StepGrant]] = {}
    total = num_warm + num_pairs * num_steps
    for config in lines:
        plans[config] = iter(load.grants(subject, total))
    found: dict[str, list[Times]] = {config: [] for config in lines}
    for config, line in lines.items():
        line.run([next(plans[config]) for _ in range(num_warm * per_step)], time.perf_counter)
    names = list(lines)
    for letter in order(num_pairs) if len(names) > 1 else "A" * num_pairs:
        config = names["AB".index(letter)]
        block = [next(plans[config]) for _ in range(num_steps * per_step)]
        found[config].append(lines[config].run(block, time.perf_counter))
    blocks = {config: [_whole_us(times, per_step) for times in found[config]] for config in names}
    for config in names:
        title = name if config == names[-1] else f"{name}, {config}"  # the plain name has the last one
        place.tell(_row(place, title, subject, load, found[config], blocks[config]))
    if len(names) > 1:
        ratio = paired_ratio(blocks[names[0]], blocks[names[1]], place.seed)
        interval = {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
        place.tell({"name": f"{name}: {names[1]} over {names[0]}", **interval})


def _whole_us(times: Times, per_step: int) -> list[float]:
    """Of each step, or prompt of several steps."""
    return [sum(times.step_us[at : at + per_step]) for at in range(0, len(times.step_us), per_step)]


def _row(
    place: Place, name: str, subject: Subject, load: Load, found: list[Times], blocks: list[list[float]]
) -> dict[str, Any]:
    step_us = statistics.median(us for block in blocks for us in block)
    idle_us = statistics.median(us for times in found for us in times.idle_us) if found[0].idle_us else 0.0
    return {
        "name": name,
        "step_us": step_us,
        "floor_us": load.floor_us(place, subject.shape),
        "idle_us": idle_us,
        "submit_us": statistics.median(us for times in found for us in times.submit_us),
        "tokens_per_s": 1e6 * load.num_tokens / (step_us + load.steps_a_prompt * idle_us),
        "has_graphs": all(times.num_replayed == len(times.step_us) for times in found),
        "num_rows": load.num_rows,
        "context": load.context,
    } | ({"prompt_tokens": load.num_prompt} if load.num_prompt else {})
