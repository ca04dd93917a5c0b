"""Builds an asynchronous device: tables, buffers, streams, CUDA graphs and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....runtime.device_streams.interface import Streams
from ...config import EngineConfig
from ...execute.model_runner import ModelRunner
from ...outputs import CaptureReport
from ...sample.sampler import Sampler
from .async_device import LateDevice
from .async_model import LateModel
from .cuda_graphs import Graphs, batches_of
from .device_work import TorchWork, step_memory
from .step_submission import StepLine
from .step_update import Ends
from .triton_chooser import KINDS, KernelChoosing


@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """A model, and a function that makes its device.

    `captured` describes its graphs; None with `enforce_eager`.
    """

    model: LateModel
    make_device: Callable[[], LateDevice]
    captured: CaptureReport | None


def assemble(
    streams: Streams,
    runner: ModelRunner,
    sampler: Sampler,
    config: EngineConfig,
    ends: Ends,
    clock: Callable[[], float],
) -> Late:
    """Builds the model and its device. Blocks until all graphs are captured.

    Called once, on the loading thread. `clock` returns seconds. The sampler must choose by kernels (`KernelChoosing`).
    """
    choosing, device = sampler.choosing, runner.last_tokens.device
    assert isinstance(choosing, KernelChoosing), "an asynchronous device needs a sampler that chooses by kernels"
    assert isinstance(runner.cache, KVCache) and isinstance(runner.decoder, Decoder)
    num_slots = config.max_num_seqs
    memory = step_memory(device, num_slots, config.steps_in_flight, choosing.scores)
    graphs = Graphs(num_slots, config.num_step_tokens, is_eager=config.enforce_eager, kinds=KINDS)
    work = TorchWork(
        runner.decoder,
        runner.cache,
        memory,
        choosing.choose_on_device,
        num_slots=num_slots,
        max_model_len=ends.max_model_len,
        max_step_tokens=max(config.num_step_tokens, num_slots),
        host_blocks=runner.host_blocks,
    )
    runner.read_tables(work.slots.tables)
    line = StepLine(streams, memory, work, graphs, ends, sampler)
    streams.wait()  # the weights and the cache were written on another stream
    decode, mixed = batches_of(num_slots, config.num_step_tokens)
    captured = None
    if config.enforce_eager:
        line.warm([*mixed, *decode], KINDS)
    else:
        captured = line.capture(clock)
    line.warm(decode[:1], choosing.scored_kinds)
    choosing.warm_masks(torch.float32 if device.type == "cpu" else runner.decoder.dtype)
    model = LateModel(line, work, runner, sampler, choosing)
    return Late(model, partial(LateDevice, line), captured)
