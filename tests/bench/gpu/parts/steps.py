"""Steps through the step line, on any streams: how long the device takes for one, how long it idles before it, and how
long the host takes to submit it. Decode steps of several loads, with graphs and without, and a prompt in one step.

Random weights of a real shape. Sequences begin with a context that was never computed: what keys hold changes no time.
Greedy, so sampling with truncation is not in these times.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.runtime.device_streams.interface import DeviceStreams
from millrace.stages.backends.cuda.cuda_graphs import CudaGraphs
from millrace.stages.backends.cuda.device_work import TorchDeviceWork, greedy, step_memory
from millrace.stages.backends.cuda.step_submission import StepSubmitter, SubmittedStep
from millrace.stages.backends.cuda.step_update import EndRules
from millrace.stages.messages import NO_INDICES, NO_INTS, Started, StepGrant
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.outcomes import Outcomes
from tests.bench.gpu.floors import GPU_SHAPES, decode_floor_s, prefill_floor_s
from tests.bench.gpu.place import TINY, Place

STEPS_IN_FLIGHT = 2
NUM_WARM = 5  # steps whose times do not count
NUM_TIMED = 50
NUM_PROMPTS = 8  # of which the first ones, as many as NUM_WARM, do not count
BLOCK_SIZE = 16
LOADS = ((1, 1024), (64, 1024), (256, 1024), (64, 8192))  # rows, tokens of context
TINY_LOADS = ((1, 20), (3, 40))
PROMPT_TOKENS = 8192


def run_small(place: Place) -> None:
    """The part `steps-0.6b`."""
    run(place, "qwen3-0.6b")


def run_large(place: Place) -> None:
    """The part `steps-8b`."""
    run(place, "llama-3.1-8b")


def run(place: Place, shape: str) -> None:
    """Tells a row for each load, without graphs and with them, and one for a prompt."""
    loads, num_prompt = (TINY_LOADS, 70) if place.is_dry else (LOADS, PROMPT_TOKENS)
    sizes = [(num_rows, context + NUM_WARM + NUM_TIMED) for num_rows, context in loads]
    sizes.append((1, num_prompt + 1))
    subject = Subject(TINY if place.is_dry else GPU_SHAPES[shape], place.device, sizes, BLOCK_SIZE, num_prompt)
    name = "tiny" if place.is_dry else shape
    for is_eager in (True, False):
        line = subject.line(streams_of(place), time.perf_counter, is_eager=is_eager)
        for load in loads:
            place.tell({"shape": name, **as_json([measure(subject, line, *load, time.perf_counter)])[0]})
        if is_eager:
            row = measure_prompt(subject, line, num_prompt, time.perf_counter)
            place.tell({"shape": name, "prompt_tokens": num_prompt, **as_json([row])[0]})


def streams_of(place: Place) -> DeviceStreams:
    if place.is_dry:
        from millrace.runtime.device_streams.simulated import SimStreams

        return SimStreams(Random(place.seed))
    from millrace.stages.backends.cuda.cuda_streams import CudaStreams

    return CudaStreams(place.device)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the timed steps of one load."""

    num_rows: int
    context: int
    has_graphs: bool
    step_us: float  # on the device, from the beginning to `done`
    idle_us: float  # between two steps
    submit_us: float  # of the host
    floor_us: float
    tokens_per_s: float  # by what a step and the gap before it take together

    @property
    def floor_share(self) -> float:
        return self.floor_us / self.step_us


class Subject:
    """One model, with a cache that holds the largest of `loads`: (sequences, tokens that each comes to)."""

    def __init__(
        self,
        shape: dict[str, Any],
        device: torch.device,
        loads: Sequence[tuple[int, int]],
        block_size: int,
        max_step_tokens: int = 0,
    ) -> None:
        self.shape, self.device, self.block_size = shape, device, block_size
        self.max_num_seqs = max(num_rows for num_rows, _ in loads)
        self.max_step_tokens = max(self.max_num_seqs, max_step_tokens)
        self.max_model_len = max_model_len = max(length for _, length in loads)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            config = read_spec(Path(folder))
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            weights = load_weights(Path(folder), config, device, dtype, load_format="dummy")
        kernels = kernel_set.load("torch" if device.type == "cpu" else "triton")
        self.decoder = Decoder(config, weights, kernels, max_positions=max_model_len)
        num_blocks = 1 + max(num_rows * -(-length // block_size) for num_rows, length in loads)
        self.cache = KVCache(config, num_blocks, block_size, dtype, device)

    def line(self, streams: DeviceStreams, clock: Callable[[], float], *, is_eager: bool) -> StepSubmitter:
        """A new step line for it, captured unless it is eager."""
        ends = EndRules((), self.max_model_len)
        memory = step_memory(self.device, self.max_num_seqs, STEPS_IN_FLIGHT)
        graphs = CudaGraphs(self.max_num_seqs, 0, is_eager=is_eager)
        work = TorchDeviceWork(
            self.decoder,
            self.cache,
            memory,
            greedy,
            num_slots=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_step_tokens,
        )
        line = StepSubmitter(streams, memory, work, graphs, ends, Outcomes(self.max_num_seqs, ends))
        if not is_eager:
            line.capture(clock)
        return line


def measure(subject: Subject, line: StepSubmitter, num_rows: int, context: int, clock: Callable[[], float]) -> Row:
    """Runs NUM_WARM + NUM_TIMED decode steps of so many sequences."""
    grants = decode_grants(subject, num_rows, context, NUM_WARM + NUM_TIMED)
    floor_s = decode_floor_s(subject.shape, num_rows, context)
    return _measure(line, grants, NUM_WARM, clock, num_rows, num_rows, context, floor_s)


def measure_prompt(subject: Subject, line: StepSubmitter, num_tokens: int, clock: Callable[[], float]) -> Row:
    """Runs NUM_PROMPTS steps of a whole prompt each; `tokens_per_s` counts those of the prompt."""
    grants = prompt_grants(subject, num_tokens, min(NUM_PROMPTS, subject.max_num_seqs))
    floor_s = prefill_floor_s(subject.shape, num_tokens)
    return _measure(line, grants, len(grants) // 2, clock, num_tokens, 1, num_tokens, floor_s)


def _measure(
    line: StepSubmitter,
    grants: list[StepGrant],
    num_warm: int,
    clock: Callable[[], float],
    tokens_a_step: int,
    num_rows: int,
    context: int,
    floor_s: float,
) -> Row:
    num_replayed = line.graphs.num_replayed
    step_us, idle_us, submit_us = run_steps(line, grants, clock)
    step_time = statistics.median(step_us[num_warm:])
    idle = statistics.median(idle_us[num_warm:] or idle_us)
    return Row(
        num_rows=num_rows,
        context=context,
        has_graphs=line.graphs.num_replayed > num_replayed,
        step_us=step_time,
        idle_us=idle,
        submit_us=statistics.median(submit_us[num_warm:]),
        floor_us=1e6 * floor_s,
        tokens_per_s=1e6 * tokens_a_step / (step_time + idle),
    )


def run_steps(
    line: StepSubmitter, grants: Sequence[StepGrant], clock: Callable[[], float]
) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of each step on the device, of the gap before each but the first, and of the host to submit each."""
    under_way: deque[SubmittedStep] = deque()
    step_us, idle_us, submit_us = list[float](), list[float](), list[float]()
    before: SubmittedStep | None = None

    def tell(before: SubmittedStep | None) -> SubmittedStep:
        step = under_way.popleft()
        step.wait()
        step_us.append(step.done.us_since(step.began))
        if before is not None:
            idle_us.append(step.began.us_since(before.done))
        return step

    for grant in grants:
        began = clock()
        step = line.forward(grant)
        under_way.append(line.sample(grant, step))
        submit_us.append(1e6 * (clock() - began))
        if len(under_way) == STEPS_IN_FLIGHT:
            before = tell(before)
    while under_way:
        before = tell(before)
    return step_us, idle_us, submit_us


def decode_grants(subject: Subject, num_rows: int, context: int, num_steps: int) -> list[StepGrant]:
    """Sequences that have `context` tokens, one more in each step."""
    assert context + num_steps <= subject.max_model_len and num_rows <= subject.max_num_seqs
    slots, per_slot = np.arange(num_rows), -(-(context + num_steps) // subject.block_size)
    params = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    known = np.zeros(context, np.int32)
    started = tuple(Started(slot, slot, f"r{slot}", known, context, params, seed=0) for slot in range(num_rows))
    first = StepGrant(
        step=0,
        generation=0,
        slots=slots,
        starts=np.full(num_rows, context - 1, np.int32),
        num_tokens=np.ones(num_rows, np.int32),
        is_sampled=np.ones(num_rows, np.bool_),
        table_slots=np.repeat(slots, per_slot),
        table_places=np.tile(np.arange(per_slot), num_rows),
        table_blocks=np.arange(1, num_rows * per_slot + 1, dtype=np.int32),
        is_decode=True,
        started=started,
    )
    later = [
        StepGrant(
            step=step,
            generation=0,
            slots=slots,
            starts=np.full(num_rows, context - 1 + step, np.int32),
            num_tokens=first.num_tokens,
            is_sampled=first.is_sampled,
            table_slots=NO_INDICES,
            table_places=NO_INDICES,
            table_blocks=NO_INTS,
            is_decode=True,
        )
        for step in range(1, num_steps)
    ]
    return [first, *later]


def prompt_grants(subject: Subject, num_tokens: int, num_prompts: int) -> list[StepGrant]:
    """A prompt in each step, whole, all in the same blocks: each in a slot of its own, as its first token ends it."""
    num_blocks = -(-(num_tokens + 1) // subject.block_size)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    known = np.zeros(num_tokens, np.int32)
    return [
        StepGrant(
            step=step,
            generation=0,
            slots=np.array([step]),
            starts=np.zeros(1, np.int32),
            num_tokens=np.array([num_tokens], np.int32),
            is_sampled=np.ones(1, np.bool_),
            table_slots=np.full(num_blocks, step),
            table_places=np.arange(num_blocks),
            table_blocks=np.arange(1, num_blocks + 1, dtype=np.int32),
            is_decode=False,
            started=(Started(step, step, f"p{step}", known, num_tokens, params, seed=0),),
        )
        for step in range(num_prompts)
    ]


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Plain data, with the share of the floor."""
    return [asdict(row) | {"floor_share": row.floor_share} for row in rows]
