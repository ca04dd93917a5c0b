"""Rank 0 of a pipeline, which has the last layers. Its steps and copies are ordered by `PipelineRunner`."""

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
from ....model.sharding.adapter_shards import adapter_shard
from ....model.sharding.comm import Comm
from ....model.sharding.layer_split import LayerRange, adapter_of_layers, spec_of_layers
from ....model.sharding.rank_grid import RankGrid
from ....model.spec import DecoderSpec
from ...executor.orders import WeightBytes
from .leading import Leader, LeadingCache, LeadingDecoder

HIDDEN = "hidden states"  # a call of each rank of a pipeline in each step


class LayerLeader(Leader):
    """As `Leader`. `ranges` are the layers of all ranks, in the order of layers; the last are this rank's."""

    def __init__(self, ranges: Sequence[LayerRange], grid: RankGrid, *args: Any) -> None:
        super().__init__(*args)
        self.ranges, self.grid = ranges, grid

    def part_of(self, adapter: Adapter, rank: int) -> Adapter:
        if self.shares is not None:
            adapter = adapter_shard(adapter, self.whole, self.grid.share_of(rank))
        return adapter_of_layers(adapter, self.ranges[self.grid.range_of(rank)])

    def _own_decoder(self, *args: Any, **options: Any) -> LastLayers:
        return LastLayers(self, *args, **options)

    def _own_cache(self, whole: DecoderSpec, *args: Any, **options: Any) -> LeadingCache:
        return LeadingCache(self, spec_of_layers(whole, self.ranges[-1]), *args, **options)


class LastLayers(LeadingDecoder):
    """This rank's decoder: its first layer reads what the rank before has computed. Sizes are of all layers.

    NOTE: a step waits for the other ranks, which must have its order: see `PipelineRunner`.
    """

    def __init__(self, leader: LayerLeader, *args: Any, **options: Any) -> None:
        super().__init__(leader, *args, comm=leader.shares, is_head_whole=True, **options)
        self._grid = leader.grid

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache, entering: Tensor | None = None) -> Tensor:
        if entering is None:
            entering = receive_hidden(self.leader.comm, self, len(inputs.input_ids), self._grid)
        return super().hidden(inputs, cache, entering)

    @torch.inference_mode()
    def skip(self, inputs: StepInputs[Tensor], cache: Any) -> None:
        """Takes what the ranks before have computed of a void step, and goes on with those that share these layers."""
        hidden = receive_hidden(self.leader.comm, self, len(inputs.input_ids), self._grid)
        if self.leader.shares is not None:
            super().hidden(inputs, cache, hidden)

    def weights_bytes(self) -> int:
        """Those of the first share of all layers, with the rotary tables that each rank has of its own."""
        others = self.leader.line.ask(WeightBytes(), "the size of the weights")
        firsts = list(map(int, others[self._grid.num_shares - 1 :: self._grid.num_shares]))
        return super().weights_bytes() + sum(firsts) + len(firsts) * tables_bytes(self.spec, self.max_positions)

    def step_bytes(self, num_tokens: int, max_model_len: int, *, is_kv_fp8: bool = False) -> int:
        """Those of all ranges of layers, which compute steps at the same time."""
        return self._grid.num_ranges * super().step_bytes(num_tokens, max_model_len, is_kv_fp8=is_kv_fp8)


def receive_hidden(comm: Comm, decoder: Decoder, num_tokens: int, grid: RankGrid) -> Tensor:
    """The hidden states [num_tokens, hidden] that the rank before has computed, noted in the log of calls."""
    like = torch.empty(num_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    comm.log.note(HIDDEN, like)
    return comm.receive(like, grid.before(comm.rank))
