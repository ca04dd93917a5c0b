"""The memory of the KV cache: one allocation with a view for each layer. The caller assigns blocks to sequences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.layout.kv_layout import KVKind, KVLayout
from ...kernels.reference import kernel_set
from ..spec import DecoderSpec
from .upload import upload, zeros

if TYPE_CHECKING:
    from .recurrent import RecurrentStates

Ids = NDArray[np.int64]  # [C] block ids, on the host


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens, for every layer that has them.

    On a GPU a block is contiguous over all layers, [N, layers, 2, G, B, D], so swapping or copying it is one transfer.
    On a CPU the blocks of a head are contiguous, [layers, 2, G, N, B, D], so a layer's gather stays within a range of
    memory, and consecutive blocks can be read in place. Kernels take strides and see [N, G, B, D] in both cases.
    Latents are keys and values at once: 1 in place of 2, and one head.

    A cache with blocks of several kinds is slabs, and each kind sees all of them as its blocks, [N, layers of the kind,
    2, G, B, D] anywhere. The caller lends a slab to one kind at a time.

    Memory starts as zeros, because masked tokens are multiplied by a probability of 0, and 0 times NaN is NaN.
    """

    def __init__(
        self,
        config: DecoderSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet = kernel_set,
        scales: Tensor | None = None,
        *,
        is_block_major: bool | None = None,
        layout: KVLayout | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """Allocates the cache on `device`; `kernels` copies blocks.

        `scales` [layers, 2, G] f32 are required for a cache in float8_e4m3fn, and for no other: see `kv_scales.py`.
        `is_block_major`: whether a block is contiguous over all layers; None = on a GPU. `layout`: with several kinds,
        of which the first has `num_blocks`; one kind is as None. `states`: of the layers that keep no keys and values.
        """
        assert (scales is not None) == (dtype == torch.float8_e4m3fn)
        self._copy_blocks = kernels.copy_blocks
        self.states = states
        self.num_blocks = num_blocks
        self.block_size = block_size
        has_kinds = layout is not None and len(layout.kinds) > 1
        self.is_block_major = has_kinds or (device.type != "cpu" if is_block_major is None else is_block_major)
        self._block_axis = 0 if self.is_block_major else 3
        if has_kinds and layout is not None:
            assert (layout.num_blocks[0], layout.block_size) == (num_blocks, block_size), f"{layout} of other sizes"
            memory = zeros((layout.num_slabs * layout.slab_bytes // dtype.itemsize,), dtype, device)
            self.data_of = [_blocks_of(memory, layout, kind) for kind in range(len(layout.kinds))]
            self._copied = [memory.view(len(data), -1) for data in self.data_of]  # with what lies between blocks
            self._places = {layer: place for layer, place in enumerate(layout.place) if place is not None}
        else:
            assert config.has_one_shape, "heads of different sizes need a layout"
            heads = len(config.kv_layers), config.cache_parts, config.num_kv_heads
            tile = block_size, config.head_dim
            self.data_of = self._copied = [zeros(self._shape(num_blocks, heads, tile), dtype, device)]
            self._places = {layer: (0, place) for place, layer in enumerate(config.kv_layers)}
            self._places |= {layer: self._places[donor] for layer, donor in config.donors.items()}
        self.blocks_of_kinds = tuple(len(copied) if has_kinds else num_blocks for copied in self._copied)
        axes = (1, 2, 0, 3, 4, 5) if self.is_block_major else (0, 1, 3, 2, 4, 5)
        by_layer = [data.permute(axes) for data in self.data_of]
        self._layers = {
            layer: (by_layer[kind][place, 0], by_layer[kind][place, -1])
            for layer, (kind, place) in self._places.items()
        }
        self._scales: dict[int, tuple[Tensor, Tensor] | tuple[None, None]] = dict.fromkeys(self._layers, (None, None))
        if scales is not None:
            self._scales = {
                layer: (keys, values) for layer, (keys, values) in zip(config.kv_layers, scales, strict=True)
            }
            self._scales |= {layer: self._scales[donor] for layer, donor in config.donors.items()}

    @property
    def data(self) -> Tensor:
        """The blocks of the first kind."""
        return self.data_of[0]

    def kind_of(self, index: int) -> int:
        """The kind of blocks of one layer."""
        return self._places[index][0]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, views of [N, G, B, D] each; of the same memory, if it keeps latents."""
        return self._layers[index]

    def layer_scales(self, index: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The scales that one layer's stored keys and values are divided by, [G] f32 each; None without scales."""
        return self._scales[index]

    def copy_blocks(self, source: Ids, destination: Ids, kind: int = 0) -> None:
        """Copies whole blocks of a kind, all its layers: `destination[i]` becomes a copy of `source[i]`.

        No block is in both.
        """
        source_ids, destination_ids = (upload(ids, self.data.device) for ids in (source, destination))
        self._copy_blocks(self._copied[kind], self._block_axis, source_ids, destination_ids)

    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Tensor:
        """Host memory for `num_blocks` blocks of a kind, in the layout of this cache; uninitialised.

        Pinned if the cache is on a GPU, and then allocated at once. Otherwise unused blocks take address space only.
        """
        data = self.data_of[kind]
        heads = data.shape[1:4] if self.is_block_major else data.shape[:3]
        shape = self._shape(num_blocks, tuple(heads), tuple(data.shape[4:]))
        return torch.empty(shape, dtype=data.dtype, pin_memory=data.is_cuda)

    def copy_out(self, blocks: Ids, host: Tensor, places: Ids, kind: int = 0) -> None:
        """Copies block `blocks[i]` to block `places[i]` of `host` (see `make_host_blocks`), all layers."""
        self._copy(self.data_of[kind], blocks, host, places)

    def copy_in(self, host: Tensor, places: Ids, blocks: Ids, kind: int = 0) -> None:
        """Copies block `places[i]` of `host` to block `blocks[i]`, all layers."""
        self._copy(host, places, self.data_of[kind], blocks)

    def _copy(self, source: Tensor, source_ids: Ids, destination: Tensor, destination_ids: Ids) -> None:
        """Copies block by block: on a GPU one asynchronous transfer each, on the current stream."""
        axis = self._block_axis
        for source_id, destination_id in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            destination.select(axis, destination_id).copy_(source.select(axis, source_id), non_blocking=True)

    def _shape(self, num_blocks: int, heads: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
        return (num_blocks, *heads, *tile) if self.is_block_major else (*heads, num_blocks, *tile)

    @staticmethod
    def bytes_per_block(config: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block, all layers, keys and values."""
        return config.cached_numbers * block_size * dtype.itemsize


def _blocks_of(memory: Tensor, layout: KVLayout, index: int) -> Tensor:
    """The slabs in `memory` as blocks of a kind, [N, layers of the kind, 2, G, B, D]."""
    kind: KVKind = layout.kinds[index]
    assert kind.key_dim == kind.value_dim, f"{kind}: keys and values of one size only"
    tile = (kind.num_kv_heads, layout.block_size, kind.key_dim)
    shape = (layout.num_blocks[index], len(kind.layers), 2, *tile)
    assert math.prod(shape[1:]) * memory.itemsize == kind.block_bytes, f"{kind}: blocks in {memory.dtype}"
    stride, rest = divmod(layout.block_stride(index), memory.itemsize)
    assert not rest and stride * memory.itemsize * layout.blocks_per_slab[index] == layout.slab_bytes
    head = layout.block_size * kind.key_dim
    both = kind.num_kv_heads * head
    return memory.as_strided(shape, (stride, 2 * both, both, head, kind.key_dim, 1))
