"""Rank 0 of a pipeline, which has the last layers: makes decoders and caches of all ranks, and sends them adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.rope import tables_bytes
from ....model.decoder.step_inputs import StepInputs
from ....model.lora.adapter import Adapter
from ....model.sharding.comm import Comm
from ....model.sharding.layer_split import LayerRange, adapter_of_layers, spec_of_layers
from ....model.spec import DecoderSpec
from ....runtime.processes.order_line import OrderLine
from ...executor.executor import StartedRanks
from ...executor.orders import AdapterPart, MakeCache, MakeDecoder, MakeHostBlocks, WeightBytes
from .leading import adapter_parts

HIDDEN = "hidden states"  # a call of each rank of a pipeline in each step


class LayerLeader:
    """The line to the other ranks. `ranges` are the layers of all, in the order of layers; the last are this rank's."""

    def __init__(
        self, ranges: Sequence[LayerRange], line: OrderLine, ranks: StartedRanks, comm: Comm, whole: DecoderSpec
    ) -> None:
        self.line, self.comm, self.whole, self.ranges = line, comm, whole, ranges
        self._ranks = ranks

    @property
    def own(self) -> LayerRange:
        """The layers of this rank."""
        return self.ranges[-1]

    def make_decoder(self, *args: Any, max_positions: int, **options: Any) -> LastLayers:
        """This rank's decoder, of which the others make theirs."""
        self.line.ask(MakeDecoder(max_positions), "a decoder")
        return LastLayers(self, *args, max_positions=max_positions, **options)

    def make_cache(
        self, whole: DecoderSpec, num_blocks: int, *args: Any, is_block_major: bool | None = None, **options: Any
    ) -> LastCache:
        """This rank's KV cache, of which the others make theirs, each for its layers."""
        cache = LastCache(self, num_blocks, *args, is_block_major=is_block_major, **options)
        self.line.ask(MakeCache(cache.num_blocks, cache.is_block_major), f"a cache of {cache.num_blocks} blocks")
        return cache

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Gives each other rank its layers of an adapter, and waits for them."""
        shares = [adapter_of_layers(adapter, layers) for layers in self.ranges[:-1]]
        for place in sorted({place for share in shares for place in share.linears}):
            self.line.answers(self.line.send_each(adapter_parts(slot, shares, place), f"adapter {adapter.name}"))
        self.line.ask(AdapterPart(slot, adapter.name, adapter.dtype), f"adapter {adapter.name}")

    def close(self) -> None:
        """Ends all other ranks. Idempotent."""
        self.line.close()
        self._ranks.close()


class LastLayers(Decoder):
    """This rank's decoder: its first layer reads what the rank before has computed. Sizes are of all ranks.

    NOTE: a step waits for the other ranks, which must have its order: see `PipelineRunner`.
    """

    runs_kinds = False  # orders to the other ranks have one table a sequence

    def __init__(self, leader: LayerLeader, spec: DecoderSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.leader = leader

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache, entering: Tensor | None = None) -> Tensor:
        if entering is None:
            entering = receive_hidden(self.leader.comm, self, len(inputs.input_ids))
        return super().hidden(inputs, cache, entering)

    def skip(self, num_tokens: int) -> None:
        """Receives the hidden states of a step that is void, in place of `hidden`."""
        receive_hidden(self.leader.comm, self, num_tokens)

    def weights_bytes(self) -> int:
        """Those of all ranks, with the rotary tables that each has of its own."""
        others = self.leader.line.ask(WeightBytes(), "the size of the weights")
        return (
            super().weights_bytes() + sum(map(int, others)) + len(others) * tables_bytes(self.spec, self.max_positions)
        )

    def step_bytes(self, num_tokens: int, max_model_len: int, *, is_kv_fp8: bool = False) -> int:
        """Those of all ranks, which compute steps at the same time."""
        return len(self.leader.ranges) * super().step_bytes(num_tokens, max_model_len, is_kv_fp8=is_kv_fp8)


class LastCache(KVCache):
    """This rank's cache. Copies of blocks are ordered by `PipelineRunner`."""

    def __init__(self, leader: LayerLeader, num_blocks: int, *args: Any, **options: Any) -> None:
        super().__init__(spec_of_layers(leader.whole, leader.own), num_blocks, *args, **options)
        self.leader = leader

    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Tensor:
        self.leader.line.ask(MakeHostBlocks(num_blocks), f"{num_blocks} host blocks")
        return super().make_host_blocks(num_blocks)


def receive_hidden(comm: Comm, decoder: Decoder, num_tokens: int) -> Tensor:
    """The hidden states [num_tokens, hidden] that the rank before has computed, noted in the log of calls."""
    like = torch.empty(num_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    comm.log.note(HIDDEN, like)
    return comm.receive(like, (comm.rank - 1) % comm.size)
