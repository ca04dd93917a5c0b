"""Rank 0's decoder, cache and adapters: each call is an order to the other ranks first, and then its own part.

So what uses them does not know of other ranks, and everything but the model itself exists once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import Ids, KVCache
from ....model.decoder.lora_linear import LoraTable
from ....model.decoder.lora_slots import LoraSlots
from ....model.decoder.step_inputs import StepInputs
from ....model.lora.adapter import Adapter
from ....model.sharding.adapter_shards import adapter_shard
from ....model.sharding.comm import Comm
from ....model.sharding.shard import RankShare
from ....model.spec import DecoderSpec
from ....runtime.processes.order_line import OrderLine
from ...executor.executor import StartedRanks
from ...executor.orders import (
    STEP_ARRAYS,
    AdapterPart,
    CopyOrder,
    FreeMemory,
    LogitsOrder,
    MakeCache,
    MakeDecoder,
    MakeHostBlocks,
    MeasureScales,
    SentTables,
    StepOrder,
)

Longs = NDArray[np.int64]


class RankLeader:
    """The line to the other ranks, with what rank 0 has of the model. `whole` is the spec of the whole decoder."""

    def __init__(self, line: OrderLine, ranks: StartedRanks, comm: Comm, whole: DecoderSpec) -> None:
        self.line, self.comm, self.whole = line, comm, whole
        self._ranks = ranks
        self.adapter_slots: Longs | None = None  # of the tokens of the next step
        self.tables = SentTables()
        self.is_measuring = False  # the others run the same steps by themselves

    @property
    def size(self) -> int:
        """Ranks, this one included."""
        return self.comm.size

    def order(self, order: Any, about: str, num_tokens: int = 0) -> AbstractContextManager[None]:
        """Sends an order; rank 0's own part is the body of the `with` statement."""
        if self.is_measuring:
            return nullcontext()
        number = self.line.send(order, about, num_tokens)
        return self.line.obeying(number, lambda: (self.comm.log.number, self.comm.log.last))

    def make_decoder(self, *args: Any, max_positions: int, **options: Any) -> LeadingDecoder:
        """Rank 0's decoder, of which the others make theirs."""
        self.line.ask(MakeDecoder(max_positions), "a decoder")
        return LeadingDecoder(self, *args, max_positions=max_positions, **options)

    def make_cache(self, *args: Any, is_block_major: bool | None = None, **options: Any) -> LeadingCache:
        """Rank 0's KV cache, of which the others make theirs."""
        cache = LeadingCache(self, *args, is_block_major=is_block_major, **options)
        self.line.ask(MakeCache(cache.num_blocks, cache.is_block_major), f"a cache of {cache.num_blocks} blocks")
        return cache

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

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Gives each other rank its share of an adapter."""
        shares = [adapter_shard(adapter, self.whole, RankShare(rank, self.size)) for rank in range(1, self.size)]
        for place in sorted({place for share in shares for place in share.linears}):
            self.line.answers(self.line.send_each(adapter_parts(slot, shares, place), f"adapter {adapter.name}"))
        self.line.ask(AdapterPart(slot, adapter.name, adapter.dtype), f"adapter {adapter.name}")

    def close(self) -> None:
        """Ends all other ranks. Idempotent."""
        self.line.close()
        self._ranks.close()


class LeadingDecoder(Decoder):
    """Rank 0's decoder."""

    runs_kinds = False  # orders to the other ranks have one table a sequence

    def __init__(self, leader: RankLeader, *args: Any, **options: Any) -> None:
        super().__init__(*args, comm=leader.comm, **options)
        self.leader = leader

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
        with self.leader.order(LogitsOrder(len(hidden)), f"logits of {len(hidden)} rows"):
            return super().logits(self.leader.comm.broadcast(hidden), out)

    def _step(self, inputs: StepInputs[Tensor], *, has_logits: bool) -> AbstractContextManager[None]:
        leader, slots = self.leader, self.leader.adapter_slots
        if leader.is_measuring:
            return nullcontext()
        about = f"a step of {len(inputs.input_ids)} tokens in {len(inputs.lengths)} rows"
        order = step_order(inputs, has_logits, slots, leader.tables)
        return leader.order(order, about, len(inputs.input_ids))


class LeadingCache(KVCache):
    """Rank 0's cache."""

    def __init__(self, leader: RankLeader, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leader = leader

    def copy_blocks(self, source: Ids, destination: Ids, kind: int = 0) -> None:
        with self._copying("fork", source, destination):
            super().copy_blocks(source, destination)

    def copy_out(self, blocks: Ids, host: Tensor, places: Ids, kind: int = 0) -> None:
        with self._copying("out", blocks, places):
            super().copy_out(blocks, host, places)

    def copy_in(self, host: Tensor, places: Ids, blocks: Ids, kind: int = 0) -> None:
        with self._copying("in", places, blocks):
            super().copy_in(host, places, blocks)

    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Tensor:
        self.leader.line.ask(MakeHostBlocks(num_blocks), f"{num_blocks} host blocks")
        return super().make_host_blocks(num_blocks)

    def _copying(self, kind: str, sources: Ids, destinations: Ids) -> AbstractContextManager[None]:
        return self.leader.order(CopyOrder(kind, sources, destinations), f"copies {kind} of {len(sources)} blocks")


class LeadingAdapters:
    """The adapters of rank 0, for its runner: see `AdapterTable`."""

    def __init__(self, leader: RankLeader, own: LoraTable | LoraSlots) -> None:
        self._leader, self._own = leader, own

    def load(self, slot: int, adapter: Adapter) -> None:
        """Loads an adapter on all ranks. An adapter that does not fit is refused before the others hear of it."""
        self._own.load(slot, adapter_shard(adapter, self._leader.whole, RankShare(0, self._leader.size)))
        self._leader.load_adapter(slot, adapter)

    def begin_step(self, slots: Longs | None) -> None:
        """Sets the adapter slot of each token of the next step."""
        self._leader.adapter_slots = slots
        self._own.begin_step(slots)


def step_order(inputs: StepInputs[Tensor], has_logits: bool, adapters: Longs | None, tables: SentTables) -> StepOrder:
    """A step as an order: its arrays on the host, and what differs from the `tables` sent before."""
    arrays = {name: getattr(inputs, name).cpu().numpy() for name in STEP_ARRAYS}
    changes = tables.changes(inputs.block_tables.cpu().numpy())
    return StepOrder(
        **arrays, block_tables=changes, num_decode=inputs.num_decode, has_logits=has_logits, adapters=adapters
    )


def adapter_parts(slot: int, shares: Sequence[Adapter], place: Any) -> list[AdapterPart]:
    """The linear at `place` of each rank's share of an adapter."""
    layer, linear = place
    return [AdapterPart(slot, share.name, share.dtype, layer, linear, _slices(share, place)) for share in shares]


def _slices(adapter: Adapter, place: Any) -> Sequence[tuple[int, Any, Any]]:
    def made() -> Iterator[tuple[int, Any, Any]]:
        for one in adapter.linears.get(place, ()):
            yield one.row_start, np.ascontiguousarray(one.a), np.ascontiguousarray(one.b)

    return tuple(made())
