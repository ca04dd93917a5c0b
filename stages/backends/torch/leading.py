"""Rank 0 of several: makes decoders, caches and adapters of all ranks, each time by an order first and then here.

So what uses them does not know of other ranks, and everything but the model itself exists once. What differs is how a
model is dealt: by shares of every layer (`share_leader.py`), or by layers (`layer_leader.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.recurrent import RecurrentStates
from ....model.decoder.step_inputs import StepInputs
from ....model.lora.adapter import Adapter
from ....model.sharding.comm import Comm
from ....model.spec import DecoderSpec
from ....runtime.processes.order_line import OrderLine
from ...executor.executor import StartedRanks
from ...executor.orders import (
    STEP_ARRAYS,
    AdapterPart,
    MakeCache,
    MakeDecoder,
    MakeHostBlocks,
    SentTables,
    StepOrder,
)

Longs = NDArray[np.int64]


class Leader(ABC):
    """The line to the other ranks, with what rank 0 has of the model. `whole` is the spec of the whole decoder.

    `comm` joins all ranks, `shares` those that share this rank's layers; None: it has them alone.
    """

    def __init__(
        self, line: OrderLine, ranks: StartedRanks, comm: Comm, shares: Comm | None, whole: DecoderSpec
    ) -> None:
        self.line, self.comm, self.shares, self.whole = line, comm, shares, whole
        self._ranks = ranks

    @property
    def size(self) -> int:
        """Ranks, this one included."""
        return self.comm.size

    @abstractmethod
    def _own_decoder(self, *args: Any, **options: Any) -> LeadingDecoder: ...

    @abstractmethod
    def _own_cache(self, *args: Any, **options: Any) -> LeadingCache: ...

    @abstractmethod
    def part_of(self, adapter: Adapter, rank: int) -> Adapter:
        """What a rank holds of an adapter."""

    def make_decoder(self, *args: Any, max_positions: int, **options: Any) -> LeadingDecoder:
        """Rank 0's decoder, of which the others make theirs."""
        self.line.ask(MakeDecoder(max_positions), "a decoder")
        return self._own_decoder(*args, max_positions=max_positions, **options)

    def make_cache(
        self, *args: Any, is_block_major: bool | None = None, states: RecurrentStates | None = None, **options: Any
    ) -> LeadingCache:
        """Rank 0's KV cache, of which the others make theirs, with the states of their recurrent layers."""
        cache = self._own_cache(*args, is_block_major=is_block_major, states=states, **options)
        order = MakeCache(cache.num_blocks, cache.is_block_major, None if states is None else states.layout)
        self.line.ask(order, f"a cache of {cache.num_blocks} blocks")
        return cache

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Gives each other rank its part of an adapter, and waits for them."""
        parts = [self.part_of(adapter, rank) for rank in range(1, self.size)]
        for place in sorted({place for part in parts for place in part.linears}):
            self.line.answers(self.line.send_each(_orders_of(slot, parts, place), f"adapter {adapter.name}"))
        self.line.ask(AdapterPart(slot, adapter.name, adapter.dtype), f"adapter {adapter.name}")

    def close(self) -> None:
        """Ends all other ranks. Idempotent."""
        self.line.close()
        self._ranks.close()


class LeadingDecoder(Decoder):
    """Rank 0's decoder."""

    runs_kinds = False  # orders to the other ranks have one table a sequence

    def __init__(self, leader: Leader, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leader = leader


class LeadingCache(KVCache):
    """Rank 0's cache."""

    def __init__(self, leader: Leader, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leader = leader

    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Tensor:
        self.leader.line.ask(MakeHostBlocks(num_blocks), f"{num_blocks} host blocks")
        return super().make_host_blocks(num_blocks)


def step_order(inputs: StepInputs[Tensor], has_logits: bool, adapters: Longs | None, tables: SentTables) -> StepOrder:
    """A step as an order: its arrays on the host, and what differs from the `tables` sent before."""
    arrays = {name: getattr(inputs, name).cpu().numpy() for name in STEP_ARRAYS}
    changes = tables.changes(inputs.block_tables.cpu().numpy())
    return StepOrder(
        **arrays,
        block_tables=changes,
        num_decode=inputs.num_decode,
        has_logits=has_logits,
        adapters=adapters,
        slots=None if inputs.slots is None else inputs.slots.cpu().numpy(),
    )


def about_step(inputs: StepInputs[Tensor]) -> str:
    """A step in words, for the errors of its order."""
    return f"a step of {len(inputs.input_ids)} tokens in {len(inputs.lengths)} rows"


def _orders_of(slot: int, parts: Sequence[Adapter], place: Any) -> list[AdapterPart]:
    """The linear at `place` of each rank's part of an adapter."""
    layer, linear = place
    return [AdapterPart(slot, part.name, part.dtype, layer, linear, _slices(part, place)) for part in parts]


def _slices(adapter: Adapter, place: Any) -> Sequence[tuple[int, Any, Any]]:
    def made() -> Iterator[tuple[int, Any, Any]]:
        for one in adapter.linears.get(place, ()):
            yield one.row_start, np.ascontiguousarray(one.a), np.ascontiguousarray(one.b)

    return tuple(made())
