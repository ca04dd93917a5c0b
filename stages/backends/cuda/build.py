"""Builds an asynchronous device: tables, buffers, streams, CUDA graphs and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.lora_slots import LoraSlots
from ....runtime.device_streams.interface import DeviceStreams
from ...config import EngineConfig
from ...execute.model_runner import ModelRunner
from ...outputs import CaptureReport, GraphBatch
from ...sample.sampler import Sampler
from .adapter_copies import AdapterCopies
from .async_device import AsyncDevice
from .async_model import AsyncModel
from .cuda_graphs import CudaGraphs, batches_of
from .device_work import TorchDeviceWork, step_memory
from .step_submission import StepSubmitter
from .step_update import EndRules
from .triton_chooser import KINDS, TritonTokenChooser


@dataclass(frozen=True, slots=True, eq=False)
class AsyncRuntime:
    """A model, and a function that makes its device.

    `captured` describes its graphs; None with `enforce_eager`.
    """

    model: AsyncModel
    make_device: Callable[[], AsyncDevice]
    captured: CaptureReport | None


def assemble(
    streams: DeviceStreams,
    runner: ModelRunner,
    sampler: Sampler,
    config: EngineConfig,
    ends: EndRules,
    clock: Callable[[], float],
) -> AsyncRuntime:
    """Builds the model and its device. Blocks until all graphs are captured.

    Called once, on the loading thread. `clock` returns seconds. The sampler must choose by kernels
    (`TritonTokenChooser`).
    """
    chooser, device = sampler.chooser, runner.last_tokens.device
    assert isinstance(chooser, TritonTokenChooser), "an asynchronous device needs a sampler that chooses by kernels"
    assert isinstance(runner.cache, KVCache) and isinstance(runner.decoder, Decoder)
    num_slots = config.max_num_seqs
    num_rows, sizes = chooser.num_rows, (num_slots, config.num_step_tokens, config.num_verified_tokens)
    memory = step_memory(device, num_slots, config.steps_in_flight, num_rows, chooser.scores, chooser.guide)
    slots = runner.decoder.adapters
    assert slots is None or isinstance(slots, LoraSlots), "an asynchronous device needs adapters in slots"
    graphs = CudaGraphs(*sizes, is_eager=config.enforce_eager, kinds=KINDS, has_adapters=slots is not None)
    work = TorchDeviceWork(
        runner.decoder,
        runner.cache,
        memory,
        chooser.choose_on_device,
        num_slots=num_slots,
        num_rows=num_rows,
        max_model_len=ends.max_model_len,
        max_step_tokens=max(config.num_step_tokens, num_rows),
        host_blocks=runner.host_blocks,
        has_rope_offsets=runner.short_length > 0,
        adapters=slots,
        host_states=runner.host_states,
    )
    runner.read_tables(work.slots.tables.view(runner.tables.shape))
    line = StepSubmitter(streams, memory, work, graphs, ends, sampler)
    if slots is not None:
        copies = AdapterCopies(streams)
        slots.copy, line.adapter_copies = copies.copy, copies.done
    streams.wait()  # the weights and the cache were written on another stream
    decode, mixed = batches_of(*sizes)
    captured = None
    if config.enforce_eager:
        line.warm([*mixed, *decode], KINDS)
    else:
        captured = line.capture(clock)
    line.warm(form_batches(runner.decoder.few_rows.form_rows, num_slots, config.num_step_tokens, decode), KINDS[:1])
    line.warm(decode[:1], chooser.scored_kinds)
    chooser.warm_attended(torch.float32 if device.type == "cpu" else runner.decoder.dtype)
    model = AsyncModel(line, work, runner, sampler, chooser)
    return AsyncRuntime(model, partial(AsyncDevice, line), captured)


def form_batches(
    form_rows: Iterable[int], num_slots: int, most_tokens: int, warmed: Sequence[GraphBatch]
) -> list[GraphBatch]:
    """Steps that launch each form of products that those `warmed` do not: it would be compiled within a request else.

    `form_rows` are the most rows of each form. More rows than slots are tokens of a step with prompts.
    """
    rows = [batch.num_rows for batch in warmed]
    found = []
    for before, most in pairwise([0, *form_rows]):
        if not any(before < each <= most for each in rows) and before < most_tokens:
            count = min(most, most_tokens)
            found.append(GraphBatch(min(count, num_slots), count, count <= num_slots))
    return found
