"""Decode steps through the step line, on any streams: how long the device takes for one, how long it idles before it,
and how long the host takes to submit it.

Random weights of a real shape. Sequences begin with a context that was never computed: what keys hold changes no time.
Greedy, so sampling with truncation is not in these times.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.kernels import backend
from millrace.model.cache import KVCache
from millrace.model.config import ModelConfig
from millrace.model.decoder import Decoder
from millrace.model.weights import load_weights
from millrace.runtime.streams import Streams
from millrace.stages.messages import NO_INDICES, NO_INTS, Started, StepGrant
from millrace.stages.params import SamplingParams
from millrace.stages.stepping.diff import Ends
from millrace.stages.stepping.graphs import Graphs
from millrace.stages.stepping.outcomes import Outcomes
from millrace.stages.stepping.submission import Step, StepLine
from millrace.stages.stepping.torch_work import TorchWork, greedy, step_memory

from .floors import decode_floor_s

STEPS_IN_FLIGHT = 2
NUM_WARM = 5  # steps whose times do not count
NUM_TIMED = 50


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
        self, shape: dict[str, Any], device: torch.device, loads: Sequence[tuple[int, int]], block_size: int
    ) -> None:
        self.shape, self.device, self.block_size = shape, device, block_size
        self.max_num_seqs = max(num_rows for num_rows, _ in loads)
        self.max_model_len = max_model_len = max(length for _, length in loads)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            config = ModelConfig.read(Path(folder))
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            weights = load_weights(Path(folder), config, device, dtype, load_format="dummy")
        kernels = backend.load("torch" if device.type == "cpu" else "triton")
        self.decoder = Decoder(config, weights, kernels, max_positions=max_model_len)
        num_blocks = 1 + max(num_rows * -(-length // block_size) for num_rows, length in loads)
        self.cache = KVCache(config, num_blocks, block_size, dtype, device)

    def line(self, streams: Streams, clock: Callable[[], float], *, is_eager: bool) -> StepLine:
        """A new step line for it, captured unless it is eager."""
        ends = Ends((), self.max_model_len)
        memory = step_memory(self.device, self.max_num_seqs, STEPS_IN_FLIGHT)
        graphs = Graphs(self.max_num_seqs, 0, is_eager=is_eager)
        work = TorchWork(
            self.decoder,
            self.cache,
            memory,
            greedy,
            num_slots=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_num_seqs,
        )
        line = StepLine(streams, memory, work, graphs, ends, Outcomes(self.max_num_seqs, ends))
        if not is_eager:
            line.capture(clock)
        return line


def measure(subject: Subject, line: StepLine, num_rows: int, context: int, clock: Callable[[], float]) -> Row:
    """Runs NUM_WARM + NUM_TIMED decode steps of so many sequences."""
    under_way: deque[Step] = deque()
    step_us, idle_us, submit_us = [], [], []
    before: Step | None = None

    def tell(before: Step | None) -> Step:
        step = under_way.popleft()
        step.wait()
        step_us.append(step.done.us_since(step.began))
        if before is not None:
            idle_us.append(step.began.us_since(before.done))
        return step

    for grant in decode_grants(subject, num_rows, context, NUM_WARM + NUM_TIMED):
        began = clock()
        step = line.forward(grant)
        under_way.append(line.sample(grant, step))
        submit_us.append(1e6 * (clock() - began))
        if len(under_way) == STEPS_IN_FLIGHT:
            before = tell(before)
    while under_way:
        before = tell(before)
    step_time, idle = (statistics.median(times[NUM_WARM:]) for times in (step_us, idle_us))
    return Row(
        num_rows=num_rows,
        context=context,
        has_graphs=line.graphs.num_replayed > 0,
        step_us=step_time,
        idle_us=idle,
        submit_us=statistics.median(submit_us[NUM_WARM:]),
        floor_us=1e6 * decode_floor_s(subject.shape, num_rows, context),
        tokens_per_s=1e6 * num_rows / (step_time + idle),
    )


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


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Plain data, with the share of the floor."""
    return [asdict(row) | {"floor_share": row.floor_share} for row in rows]
