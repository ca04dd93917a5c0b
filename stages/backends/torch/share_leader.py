"""Rank 0 of ranks that share every layer: each call of its decoder and cache is an order to the others first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ....model.decoder.kv_cache import Ids, KVCache
from ....model.decoder.lora_linear import LoraTable
from ....model.decoder.lora_slots import LoraSlots
from ....model.decoder.step_inputs import StepInputs
from ....model.lora.adapter import Adapter
from ....model.sharding.adapter_shards import adapter_shard
from ....model.sharding.shard import RankShare
from ...executor.orders import CopyOrder, FreeMemory, LogitsOrder, MeasureScales, SentTables
from .leading import Leader, LeadingCache, LeadingDecoder, Longs, about_step, step_order


class ShareLeader(Leader):
    """As `Leader`, of ranks with shares of every layer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.adapter_slots: Longs | None = None  # of the tokens of the next step
        self.tables = SentTables()
        self.is_measuring = False  # the others run the same steps by themselves

    def order(self, order: Any, about: str, num_tokens: int = 0) -> AbstractContextManager[None]:
        """Sends an order; rank 0's own part is the body of the `with` statement."""
        if self.is_measuring:
            return nullcontext()
        number = self.line.send(order, about, num_tokens)
        return self.line.obeying(number, lambda: (self.comm.log.number, self.comm.log.last))

    def measure_scales(self, measure: Callable[[], Tensor | None]) -> Tensor | None:
        """What `measure` returns on rank 0: the scales of its fp8 cache. Each rank measures those of its heads."""
        with self.order(MeasureScales(), "the scales of an fp8 cache"):
            self.is_measuring = True
            try:
                return measure()
            finally:
                self.is_measuring = False

    def free_bytes(self) -> int:
        """The least free memory of the other ranks' devices."""
        return min(map(int, self.line.ask(FreeMemory(), "free memory")))

    def part_of(self, adapter: Adapter, rank: int) -> Adapter:
        return adapter_shard(adapter, self.whole, RankShare(rank, self.size))

    def _own_decoder(self, *args: Any, **options: Any) -> FirstShare:
        return FirstShare(self, *args, **options)

    def _own_cache(self, *args: Any, **options: Any) -> FirstShareCache:
        return FirstShareCache(self, *args, **options)


class FirstShare(LeadingDecoder):
    """Rank 0's share of every layer. A step is an order, and so are logits of hidden states."""

    def __init__(self, leader: ShareLeader, *args: Any, **options: Any) -> None:
        super().__init__(leader, *args, comm=leader.comm, **options)
        self.sharing = leader

    @torch.inference_mode()
    def forward(self, inputs: StepInputs[Tensor], cache: KVCache, out: Tensor | None = None) -> Tensor:
        with self._step(inputs, has_logits=True):
            hidden = super().hidden(inputs, cache).index_select(0, inputs.logits_rows)
            return super().logits(hidden, out)

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache, entering: Tensor | None = None) -> Tensor:
        with self._step(inputs, has_logits=False):
            return super().hidden(inputs, cache, entering)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self.sharing.order(LogitsOrder(len(hidden)), f"logits of {len(hidden)} rows"):
            return super().logits(self.sharing.comm.broadcast(hidden), out)

    def _step(self, inputs: StepInputs[Tensor], *, has_logits: bool) -> AbstractContextManager[None]:
        sharing = self.sharing
        if sharing.is_measuring:
            return nullcontext()
        order = step_order(inputs, has_logits, sharing.adapter_slots, sharing.tables)
        return sharing.order(order, about_step(inputs), len(inputs.input_ids))


class FirstShareCache(LeadingCache):
    """Rank 0's share of the cache. Copies of blocks are orders."""

    def __init__(self, leader: ShareLeader, *args: Any, **options: Any) -> None:
        super().__init__(leader, *args, **options)
        self.sharing = leader

    def copy_blocks(self, source: Ids, destination: Ids, kind: int = 0) -> None:
        with self._copying("fork", source, destination):
            super().copy_blocks(source, destination)

    def copy_out(self, blocks: Ids, host: Tensor, places: Ids, kind: int = 0) -> None:
        with self._copying("out", blocks, places):
            super().copy_out(blocks, host, places)

    def copy_in(self, host: Tensor, places: Ids, blocks: Ids, kind: int = 0) -> None:
        with self._copying("in", places, blocks):
            super().copy_in(host, places, blocks)

    def _copying(self, kind: str, sources: Ids, destinations: Ids) -> AbstractContextManager[None]:
        return self.sharing.order(CopyOrder(kind, sources, destinations), f"copies {kind} of {len(sources)} blocks")


class LeadingAdapters:
    """The adapters of rank 0, for its runner: see `AdapterTable`."""

    def __init__(self, leader: ShareLeader, own: LoraTable | LoraSlots) -> None:
        self._leader, self._own = leader, own

    def load(self, slot: int, adapter: Adapter) -> None:
        """Loads an adapter on all ranks. An adapter that does not fit is refused before the others hear of it."""
        self._own.load(slot, self._leader.part_of(adapter, 0))
        self._leader.load_adapter(slot, adapter)

    def begin_step(self, slots: Longs | None) -> None:
        """Sets the adapter slot of each token of the next step."""
        self._leader.adapter_slots = slots
        self._own.begin_step(slots)
