"""A model of a real shape with random weights, and lines of steps for it, as an engine has them.

Sequences begin with a context that was never computed: what keys hold changes no time.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.tilings.tables import Tilings
from millrace.model.decoder import weights as decoder_weights
from millrace.model.decoder.adapted_kernels import with_slots
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.lora_slots import LoraSlots
from millrace.model.families.registry import read_spec
from millrace.runtime.device_streams.interface import DeviceStreams
from millrace.stages.backends.cuda.cuda_graphs import CudaGraphs
from millrace.stages.backends.cuda.device_work import TorchDeviceWork, step_memory
from millrace.stages.backends.cuda.step_submission import StepSubmitter, SubmittedStep
from millrace.stages.backends.cuda.step_update import EndRules
from millrace.stages.backends.cuda.triton_chooser import KINDS, SCORED, TritonTokenChooser
from millrace.stages.messages import StepGrant
from millrace.stages.sample.sampler import Sampler
from tests.bench.gpu.place import Place

STEPS_IN_FLIGHT = 2
BLOCK_SIZE = 16


@dataclass(slots=True, eq=False)
class Times:
    """Microseconds: of each step on the device, of the gap before each but the first, of the host to submit each."""

    step_us: list[float] = field(default_factory=list)
    idle_us: list[float] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)
    num_replayed: int = 0  # steps that were graphs


class Subject:
    """One model, with a cache that holds the largest of `loads`: (sequences, tokens that each comes to)."""

    def __init__(
        self,
        shape: dict[str, Any],
        device: torch.device,
        loads: Sequence[tuple[int, int]],
        block_size: int = BLOCK_SIZE,
        max_step_tokens: int = 0,
        *,
        is_fp8: bool = False,
    ) -> None:
        self.shape, self.device, self.block_size = shape, device, block_size
        self.max_num_seqs = max(num_rows for num_rows, _ in loads)
        self.max_step_tokens = max(self.max_num_seqs, max_step_tokens)
        self.max_model_len = max(length for _, length in loads)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            self.spec = read_spec(Path(folder))
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.weights = DrawnWeights.of(self.spec, device, self.dtype)
        self.kernels, self.sampling = kernels_for(device)
        num_blocks = 1 + max(num_rows * -(-length // block_size) for num_rows, length in loads)
        dtype = torch.float8_e4m3fn if is_fp8 else self.dtype
        sizes = (self.spec.num_layers, 2, self.spec.num_kv_heads)
        scales = torch.ones(sizes, dtype=torch.float32, device=device) if is_fp8 else None
        self.cache = KVCache(self.spec, num_blocks, block_size, dtype, device, self.kernels, scales)

    def line(
        self,
        streams: DeviceStreams,
        clock: Callable[[], float],
        *,
        num_rows: Sequence[int] = (),
        num_tokens: Sequence[int] = (),
        num_verified: int = 0,
        kinds: Sequence[int] = KINDS[:1],
        tilings: Tilings | None = None,
        slots: LoraSlots | None = None,
    ) -> StepLine:
        """A new line of steps, with graphs of these numbers of decode rows and of mixed tokens, and of so many tokens
        with drafts; without, eager. `tilings` None: the library's products. `slots`: those of LoRA adapters."""
        ends = EndRules((), self.max_model_len)
        last_tokens = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=self.device)
        choosing = partial(TritonTokenChooser, kernels=self.sampling)
        sampler = Sampler(last_tokens, self.shape["vocab_size"], self.max_model_len, chooser=choosing)
        chooser = sampler.chooser
        assert isinstance(chooser, TritonTokenChooser)
        memory = step_memory(self.device, self.max_num_seqs, STEPS_IN_FLIGHT, scores=chooser.scores)
        work = TorchDeviceWork(
            Decoder(
                self.spec,
                self.weights,
                self.kernels if slots is None else with_slots(self.kernels, slots),
                self.max_model_len,
                tilings=tilings,
                adapters=slots,
            ),
            self.cache,
            memory,
            chooser.choose_on_device,
            num_slots=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_step_tokens,
            adapters=slots,
        )
        is_eager = not (num_rows or num_tokens)
        most = max(*num_tokens, num_verified, 0)
        options: dict[str, Any] = {"is_eager": is_eager, "kinds": kinds, "has_adapters": slots is not None}
        graphs = CudaGraphs(self.max_num_seqs, most, num_verified, **options)
        graphs._decode = [batch for batch in graphs._decode if batch.num_rows in num_rows]  # a graph takes time to make
        verify = {(num_verified, num_verified)}  # rows of logits, and tokens
        graphs._mixed = [
            batch
            for batch in graphs._mixed
            if batch.num_tokens in num_tokens or (batch.num_rows, batch.num_tokens) in verify
        ]
        submitter = StepSubmitter(streams, memory, work, graphs, ends, sampler)
        streams.wait()  # weights, tables and buffers were written on another stream
        if not is_eager:
            submitter.capture(clock)
        return StepLine(submitter, sampler, chooser)


@dataclass(slots=True, eq=False)
class StepLine:
    """Steps of one subject, in order."""

    submitter: StepSubmitter
    sampler: Sampler
    chooser: TritonTokenChooser
    is_always_adapted: bool = False  # every step runs in the graph for LoRA adapters

    def submit(self, grant: StepGrant) -> SubmittedStep:
        for started in grant.started:
            self.sampler.start(started)
        kind = self.chooser.kind(grant.slots[grant.is_sampled])
        assert kind is not None, "a step that the host must see"
        has_adapters = self.is_always_adapted
        step = self.submitter.forward(grant, kind, is_scored=kind >= SCORED, has_adapters=has_adapters)
        return self.submitter.sample(grant, step)

    def run(self, grants: Sequence[StepGrant], clock: Callable[[], float]) -> Times:
        """Runs them, as many in flight as an engine has."""
        under_way: deque[SubmittedStep] = deque()
        times, before = Times(), None
        num_replayed = self.submitter.graphs.num_replayed

        def tell(before: SubmittedStep | None) -> SubmittedStep:
            step = under_way.popleft()
            step.wait()
            times.step_us.append(step.done.us_since(step.began))
            if before is not None:
                times.idle_us.append(step.began.us_since(before.done))
            return step

        for grant in grants:
            began = clock()
            under_way.append(self.submit(grant))
            times.submit_us.append(1e6 * (clock() - began))
            if len(under_way) == STEPS_IN_FLIGHT:
                before = tell(before)
        while under_way:
            before = tell(before)
        times.num_replayed = self.submitter.graphs.num_replayed - num_replayed
        return times


class DrawnWeights(decoder_weights._Loader):
    """Random weights, drawn where they stay: an 8B model's take a second instead of twenty."""

    @classmethod
    def of(cls, spec: Any, device: torch.device, dtype: torch.dtype) -> Any:
        source, spec = decoder_weights.open_source(Path(), spec, "dummy")
        return cls(source, spec, device, dtype, None).load()

    def _tensor(self, *found: str, dtype: torch.dtype | None = None) -> Tensor:
        num_rows = sum(self.shapes[name][0] for name in found)
        sizes = (num_rows, *self.shapes[found[0]][1:])
        tensor = torch.empty(sizes, dtype=dtype or self.dtype, device=self.device)
        return tensor.fill_(1.0) if found[0].endswith("norm.weight") else tensor.normal_(0.0, 0.02)


def kernels_for(device: torch.device) -> tuple[Any, Any]:
    """Of a decoder and of a sampler: Triton's, and on a CPU their twins. Meta tensors compile, see `ahead.py`."""
    if device.type == "cpu":
        return kernel_set.load("torch"), kernel_set.load_sampling("torch")
    from millrace.kernels.triton import kernel_set as triton_kernels

    return triton_kernels, triton_kernels


def streams_of(place: Place) -> DeviceStreams:
    if place.is_dry:
        from millrace.runtime.device_streams.simulated import SimStreams

        return SimStreams(Random(place.seed))
    from millrace.stages.backends.cuda.cuda_streams import CudaStreams

    return CudaStreams(place.device)
