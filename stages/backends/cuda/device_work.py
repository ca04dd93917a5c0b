"""The launches of a step on torch tensors.

Kernels make the inputs, the decoder runs, and kernels choose and record the tokens. Also runs on a CPU, with the
kernels' reference twins, and is tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.layout import step_state
from ....kernels.layout.step_state import SlotState, StepBuffers
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.recurrent import RecurrentStates
from ....model.decoder.step_inputs import KindTables, StepInputs
from ....model.decoder.upload import upload
from ...messages import STATES, Indices, Ints
from ...outputs import GraphBatch
from ...sample.draft_acceptance import last_of_each
from .guide_uploads import NUM_GUIDES
from .pinned_ring import PinnedMemory
from .step_device import SPARE_STEPS, StepMemory
from .step_update import MAX_DIFF_ITEMS, diff_size

NUM_DIFFS = 3  # pinned buffers: the device reads one while the host writes another

Choose = Callable[[Tensor, SlotState, StepBuffers, int], Tensor]
"""Maps logits [P, V], the slots' state, the step's inputs and the kind of sampling to token ids [P] i64.

All arrays are on the device. An id is below 0 where a row holds no number. For padding rows, with slot -1, it is
arbitrary.
"""


class WritesLogits(Protocol):
    """What is needed of a decoder; see `Decoder.forward`."""

    def forward(self, inputs: StepInputs[Tensor], cache: KVCache, out: Tensor | None) -> Tensor: ...


class ListsAdapters(Protocol):
    """What is needed of the slots of LoRA adapters; see `LoraSlots`."""

    def begin_device_step(self, adapters: Tensor | None) -> None: ...


class TorchDeviceWork:
    """The launches of one model: the `DeviceWork` of a `StepSubmitter`. `step_memory` allocates the memory.

    `logits`, `copy_newest_tokens` and `note` are for attended steps. They run on the device thread, in order with the
    steps.
    """

    def __init__(
        self,
        decoder: WritesLogits,
        cache: KVCache,
        memory: StepMemory,
        choose: Choose,
        *,
        num_slots: int,
        max_model_len: int,
        max_step_tokens: int,
        num_rows: int | None = None,
        host_blocks: Sequence[Tensor | None] = (),
        has_rope_offsets: bool = False,
        adapters: ListsAdapters | None = None,
        host_states: Tensor | None = None,
    ) -> None:
        """A step has at most `num_rows` rows, and rows of logits: as many as slots by default.

        `host_states`: of swapped sequences; see `RecurrentStates`.
        """
        self._decoder, self._cache, self._memory, self._choose = decoder, cache, memory, choose
        self._host_blocks, self._adapters, self._host_states = host_blocks, adapters, host_states
        device = memory.diff.device
        self._kernels = step_kernels(device)
        make = _maker(device)
        self.slots: SlotState = step_state.make_slots(
            make,
            num_slots,
            max_model_len,
            cache.block_size,
            has_rope_offsets=has_rope_offsets,
            has_adapters=adapters is not None,
            has_states=cache.states is not None,
            num_kinds=len(cache.data_of),
        )
        width = self.slots.tables.shape[1]
        self._buffers: StepBuffers = step_state.make_buffers(
            make, num_rows or num_slots, max_step_tokens, width, len(cache.data_of)
        )
        self._logits: Tensor | None = None  # [P, V] of the step between its halves; made by the first forward pass

    @torch.inference_mode()
    def apply_updates(self) -> None:
        self._kernels.apply_updates(self._memory.diff, self.slots)

    @torch.inference_mode()
    def make_inputs(self, batch: GraphBatch) -> None:
        buffers = self._buffers.of(batch.num_rows, batch.num_tokens)
        self._kernels.make_inputs(self._memory.diff, self.slots, buffers, self._cache.block_size)

    def forward(self, batch: GraphBatch) -> None:
        buffers = self._buffers.of(batch.num_rows, batch.num_tokens)
        inputs = StepInputs(
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            slot_mapping=buffers.slot_mapping,
            block_tables=buffers.block_tables,
            query_starts=buffers.query_starts,
            lengths=buffers.lengths,
            logits_rows=buffers.logits_rows,
            num_decode=batch.num_rows if batch.is_decode else 0,  # a graph serves any mix of lengths
            more_kinds=tuple(map(KindTables, buffers.more_mappings, buffers.more_tables)),
            slots=buffers.slots if self.slots.has_states else None,
        )
        if self._adapters is not None:
            self._adapters.begin_device_step(buffers.adapters if batch.has_adapters else None)
        logits = self._decoder.forward(inputs, self._cache, self._logits)
        if self._logits is None:
            self._logits = self._first_logits(logits)

    @torch.inference_mode()
    def _first_logits(self, logits: Tensor) -> Tensor:
        """Memory for the logits of any step, at an address that stays; the first step's are copied into it.

        A step's forward pass may be a graph and its sampling a launch, so all sizes of graphs write to one place.
        """
        kept = logits.new_empty(len(self._buffers.logits_rows), logits.shape[1])
        kept[: len(logits)] = logits
        return kept

    @torch.inference_mode()
    def sample(self, batch: GraphBatch, kind: int) -> None:
        assert self._logits is not None
        buffers = self._buffers.of(batch.num_rows, batch.num_tokens)
        chosen = self._choose(self._logits[: batch.num_rows], self.slots, buffers, kind)
        self._kernels.note_tokens(self._memory.result[:, : batch.num_rows], chosen, buffers, self.slots)

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, V] the logits of the last forward pass, which the next one overwrites."""
        assert self._logits is not None
        return self._logits[:num_rows]

    @torch.inference_mode()
    def copy_newest_tokens(self, last_tokens: Tensor) -> None:
        """Writes each slot's newest token into `last_tokens` [S] i64. No step may be in flight."""
        newest = (self.slots.state[:, step_state.TOKENS].long() - 1).clamp(0, self.slots.tokens.shape[1] - 1)
        last_tokens.copy_(self.slots.tokens.gather(1, newest[:, None])[:, 0])

    @torch.inference_mode()
    def note(self, slots: Indices, positions: Indices, token_ids: Indices, finishes: NDArray[np.int8]) -> None:
        """Writes tokens that the host has chosen into the tables. Tokens of one slot are adjacent.

        No step may be in flight.
        """
        state, tokens = self.slots.state, self.slots.tokens
        fits = positions < tokens.shape[1]
        where = (self._long(slots[fits]), self._long(positions[fits]))
        tokens[where] = self._long(token_ids[fits]).int()
        last = last_of_each(slots)
        at = self._long(slots[last])
        state[at, step_state.TOKENS] = self._long(positions[last] + 1).int()
        state[at, step_state.FINISHED] = self._long(finishes[last]).int()

    def _long(self, numbers: NDArray[np.integer]) -> Tensor:
        return upload(numbers.astype(np.int64), self.slots.state.device)

    def fork(self, sources: Ints, destinations: Ints, kind: int) -> None:
        ids = sources.astype(np.int64), destinations.astype(np.int64)
        if kind == STATES:
            return self._states.copy(*ids)
        self._cache.copy_blocks(*ids, kind)

    @property
    def _states(self) -> RecurrentStates:
        assert self._cache.states is not None, "states are copied, and the decoder has no recurrent layers"
        return self._cache.states

    def block(self, block: int, kind: int) -> Tensor:
        if kind == STATES:
            return self._states.memory[block]
        assert self._cache.is_block_major, "a block of this cache is not in one piece"
        return self._cache.data_of[kind][block]

    def host_block(self, block: int, kind: int) -> Tensor:
        if kind == STATES:
            assert self._host_states is not None, "states are copied to or from the host, which has no room for them"
            return self._host_states[block]
        host = self._host_blocks[kind] if self._host_blocks else None
        assert host is not None, "blocks are copied to or from the host, and the device has no host blocks"
        return host[block]


def step_memory(
    device: torch.device,
    num_slots: int,
    num_steps: int,
    num_rows: int | None = None,
    scores: Tensor | None = None,
    guide: Tensor | None = None,
) -> StepMemory:
    """Allocates the buffers between host and device, for `num_steps` steps in flight.

    A step has at most `num_rows` rows of logits: as many as slots by default. Host buffers are pinned if there is a
    GPU. On the device, `scores` [num_rows, W] i32 receives the scores of a step, and `guide` is read by the sampling of
    some.
    """
    num_rows = num_rows or num_slots
    num_results = num_steps + SPARE_STEPS
    capacity = diff_size(num_slots, MAX_DIFF_ITEMS, MAX_DIFF_ITEMS)
    return StepMemory(
        torch.zeros(capacity, dtype=torch.int32, device=device),
        torch.zeros(2, num_rows, dtype=torch.int32, device=device),
        [_pinned(device, capacity) for _ in range(NUM_DIFFS)],
        [_pinned(device, 2, num_rows) for _ in range(num_results)],
        scores,
        [] if scores is None else [_pinned(device, *scores.shape) for _ in range(num_results)],
        guide,
        [] if guide is None else [_pinned(device, *guide.shape) for _ in range(NUM_GUIDES)],
        num_slots,
    )


def greedy(logits: Tensor, slots: SlotState, buffers: StepBuffers, kind: int) -> Tensor:
    """A `Choose` that takes the likeliest token of each row and ignores all sampling parameters."""
    best, ids = logits.max(dim=1)
    return torch.where(best.isfinite(), ids, -1)


def step_kernels(device: torch.device) -> Any:
    """The module of step kernels for a device: the Triton kernels, or their reference twins."""
    if device.type == "cpu":
        return step_state
    from ....kernels.triton import step_state as triton_step

    return triton_step


def _maker(device: torch.device) -> step_state.Make:
    return lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _pinned(device: torch.device, *shape: int) -> PinnedMemory:
    memory = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    return PinnedMemory(memory.numpy(), memory)
