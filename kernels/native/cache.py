"""What steps keep of sequences: the paged cache, and the states of recurrent layers. Memory, positions, copies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..layout.kv_layout import KindName, KVKind, KVLayout
from ..layout.state_layout import StateLayout
from . import library
from .arrays import CACHE_LINE, aligned_zeros
from .page_preallocation import NO_LIMIT, PagePreallocation
from .shape import CACHE_TYPES, Array, CacheDType, DType, Longs, NativeShape

NEARLY_FULL = 3 / 4  # share of the cache in use from which blocks may soon be offloaded to the host


class NativeCache:
    """The paged cache: `memory` [slabs, numbers], uint16 for bfloat16.

    `data_of[kind]` is how a kind sees it, [slabs, layers of the kind, pieces, blocks of a slab, numbers], where all
    blocks of a slab that is not its own are another's. Zero at the start. The system hands out its pages at first use,
    or before that, between steps (`page_preallocation.py`). The library defines the contents of a block's pieces; `at`
    gives the index of a block.
    """

    def __init__(
        self,
        shape: NativeShape,
        layout: KVLayout,
        dtype: CacheDType,
        blocks_ahead: int = 0,
        available_bytes: Callable[[], int] = lambda: NO_LIMIT,
        states: NativeStates | None = None,
    ) -> None:
        """`blocks_ahead`: blocks of kind 0 past the used slabs whose memory is preallocated once `ahead` is started.

        `states`: of recurrent layers, if the model has any.
        Stops while the system has too little memory left; `available_bytes()` returns the bytes that are left. Once the
        cache is nearly full, does the same for the host blocks: as many, but at most half of them.
        """
        self.layout = layout
        self.num_blocks, self.blocks_of_kinds = layout.num_blocks[0], layout.num_blocks
        self.block_size = layout.block_size
        self.dtype = dtype
        item = np.dtype(CACHE_TYPES[dtype])
        self.memory: Array = aligned_zeros((layout.num_slabs, layout.slab_bytes // item.itemsize), item)
        self.data_of = [self._view(shape, kind, size) for kind, size in _kinds(layout)]
        self.states = states
        self.slabs, *kept = self._describe(shape)
        self.parts = (self.memory, self.slabs, states, *kept)  # what steps read
        self._blocks_ahead = blocks_ahead
        self._available_bytes = available_bytes
        self.ahead = self._take_ahead(self.memory, self._ahead_bytes(blocks_ahead))
        self.ahead_on_host: PagePreallocation | None = None  # once there are host blocks
        self._is_nearly_full = False

    @classmethod
    def uniform(
        cls, shape: NativeShape, num_blocks: int, block_size: int, dtype: CacheDType, *args: Any, **kwargs: Any
    ) -> NativeCache:
        """A cache of one kind: no layer forgets keys. The other arguments are as those of the class."""
        layers, block_bytes = shape.kv_layers, shape.bytes_per_block(block_size, dtype)
        name: KindName = "latent" if shape.has_latents else "full"
        kind = KVKind(name, layers, None, *shape.cached_sizes(shape.layers[layers[0]]), block_bytes)
        own = {layer: place for place, layer in enumerate(layers)}
        donors = [index if layer.kv_of is None else layer.kv_of for index, layer in enumerate(shape.layers)]
        places = [(0, own[donor]) if donor in own else None for donor in donors]
        layout = KVLayout.uniform(kind, block_size, num_blocks, places)
        return cls(shape, layout, dtype, *args, **kwargs)

    @property
    def data(self) -> Array:
        """`data_of` kind 0."""
        return self.data_of[0]

    def _view(self, shape: NativeShape, kind: KVKind, num_blocks: int) -> Array:
        found = {shape.cached_sizes(shape.layers[layer]) for layer in kind.layers}
        assert found == {(kind.num_kv_heads, kind.key_dim, kind.value_dim)}, f"{kind}: its layers have {found}"
        sizes = (len(kind.layers), (1 if kind.name == "latent" else 2) * kind.num_kv_heads, num_blocks)
        used = num_blocks * kind.block_bytes // self.memory.itemsize
        view = self.memory[:, :used].reshape(len(self.memory), *sizes, -1)
        assert np.may_share_memory(view, self.memory), "a copy of the cache is not the cache"
        return view

    def _describe(self, shape: NativeShape) -> tuple[library.CacheSlabsStruct, Any, Any]:
        """The cache as the library reads it, and what it refers to."""
        layout = self.layout
        found = {layer: place for layer, place in enumerate(layout.place) if place is not None}
        wanted = [index for index, layer in enumerate(shape.layers) if layer.has_attention]
        assert list(found) == wanted, f"a cache of layers {list(found)}: the model has {wanted}"
        places = [found.get(layer, (0, 0)) for layer in range(shape.num_layers)]
        assert len(layout.kinds) <= library.MAX_KINDS, f"{len(layout.kinds)} kinds: at most {library.MAX_KINDS}"
        kinds = (library.CacheKindStruct * len(layout.kinds))(
            *(
                library.CacheKindStruct(count, size, kind.window or 0, kind.num_kv_heads, kind.key_dim, kind.value_dim)
                for count, (kind, size) in zip(layout.num_blocks, _kinds(layout), strict=True)
            )
        )
        of_layers = np.array(places, np.int32).T.copy()  # [2, layers]: kinds, and places within them
        slabs = library.CacheSlabsStruct(
            memory=self.memory.ctypes.data,
            slab_bytes=layout.slab_bytes,
            block_size=layout.block_size,
            num_kinds=len(kinds),
            kinds=ctypes.addressof(kinds),
            layer_kinds=of_layers[0].ctypes.data,
            places=of_layers[1].ctypes.data,
            **({} if self.states is None else self.states.place),
        )
        return slabs, kinds, of_layers

    def _ahead_bytes(self, num_blocks: int) -> int:
        """Memory of slabs that hold so many blocks of kind 0."""
        return -(-num_blocks * self.layout.slab_bytes // self.layout.blocks_per_slab[0])

    def _take_ahead(self, region: Array, ahead_bytes: int) -> PagePreallocation:
        ahead = PagePreallocation(region.reshape(1, -1), ahead_bytes, available_bytes=self._available_bytes)
        weakref.finalize(self, ahead.stop)
        return ahead

    def note_used(self, block: int, kind: int = 0) -> None:
        """Notes that a block is used, or about to be. All slabs before its own count as used."""
        num_slabs = block // self.layout.blocks_per_slab[kind] + 1
        self.ahead.note_used(num_slabs * self.layout.slab_bytes)
        if not self._is_nearly_full and block >= NEARLY_FULL * self.layout.num_blocks[kind]:
            self._is_nearly_full = True
            if self.ahead_on_host is not None:
                self.ahead_on_host.start()

    def begin_step(self) -> None:
        """A step begins: preallocation pauses."""
        self.ahead.begin_step()
        if self.ahead_on_host is not None:
            self.ahead_on_host.begin_step()

    def end_step(self) -> None:
        """The step is over: preallocation may resume."""
        self.ahead.end_step()
        if self.ahead_on_host is not None:
            self.ahead_on_host.end_step()

    def at(self, blocks: Longs | int, kind: int = 0) -> tuple[Any, ...]:
        """Where `data_of[kind]` has one block, [layers, pieces, numbers], or B blocks, [B, layers, pieces, numbers]."""
        size = self.layout.blocks_per_slab[kind]
        return (blocks // size, slice(None), slice(None), blocks % size)

    def copy_blocks(self, sources: Longs, destinations: Longs, kind: int = 0) -> None:
        """Copies block `sources[i]` to `destinations[i]`, [C] each, in all layers of the kind. No block may be both."""
        data = self.data_of[kind]
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            data[self.at(destination, kind)] = data[self.at(source, kind)]

    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Array:
        """Allocates host blocks, [blocks, layers of the kind, pieces, numbers]; call once for each kind.

        Until the cache is nearly full they take address space only. The layers of a block are contiguous, so that a
        used block takes no more memory than it needs: with a page per layer, four blocks would take 60 MiB.
        """
        _, num_layers, num_pieces, _, numbers = self.data_of[kind].shape
        host: Array = np.empty((num_blocks, num_layers, num_pieces, numbers), self.memory.dtype)
        if kind == 0:
            assert self.ahead_on_host is None, "host blocks are already allocated"
            ahead_bytes = min(self._blocks_ahead, num_blocks // 2) * host[:1].nbytes
            self.ahead_on_host = self._take_ahead(host, ahead_bytes)
        return host

    def copy_out(self, blocks: Longs, host: Array, places: Longs, kind: int = 0) -> None:
        """Copies block `blocks[i]` to block `places[i]` of `host`, [C] each."""
        if kind == 0 and self._is_nearly_full and self.ahead_on_host is not None and len(places):
            self.ahead_on_host.note_used((int(places.max()) + 1) * host[:1].nbytes)
        data = self.data_of[kind]
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            host[place] = data[self.at(block, kind)]

    def copy_in(self, host: Array, places: Longs, blocks: Longs, kind: int = 0) -> None:
        """Copies block `places[i]` of `host` to block `blocks[i]`, [C] each."""
        data = self.data_of[kind]
        for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
            data[self.at(block, kind)] = host[place]


class NativeStates:
    """`memory` [slots and snapshots, bytes]: each state has all recurrent layers, as the library lays it out.

    A state is not cleared when its sequence ends: a sequence that begins with its first token reads zeros.
    """

    def __init__(self, shape: NativeShape, layout: StateLayout, dtype: DType) -> None:
        self.layout = layout
        stride = -(-shape.state_bytes(dtype) // CACHE_LINE) * CACHE_LINE
        self.memory: Array = aligned_zeros((layout.num_slots + layout.num_snapshots, stride), np.dtype(np.uint8))

    @property
    def place(self) -> dict[str, int]:
        """The states as fields of `CacheSlabsStruct`."""
        num_states, stride = self.memory.shape
        return {"states": self.memory.ctypes.data, "state_stride": stride, "num_states": num_states}

    def make_host_states(self) -> Array:
        """Host memory for the states of swapped sequences. Unused places take address space only."""
        return np.empty((self.layout.num_on_host, self.memory.shape[1]), np.uint8)

    def copy(self, sources: Longs, destinations: Longs) -> None:
        """Copies the state of slot or snapshot `sources[i]` to `destinations[i]`. None is in both."""
        _copy(self.memory, sources, self.memory, destinations)

    def copy_out(self, slots: Longs, host: Array, places: Longs) -> None:
        """Copies the state of `slots[i]` to place `places[i]` of `host` (see `make_host_states`)."""
        _copy(self.memory, slots, host, places)

    def copy_in(self, host: Array, places: Longs, slots: Longs) -> None:
        """Copies place `places[i]` of `host` to the state of `slots[i]`."""
        _copy(host, places, self.memory, slots)


def _copy(memory: Array, sources: Longs, to: Array, destinations: Longs) -> None:
    """One at a time, without a copy in between."""
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        to[destination] = memory[source]


def _kinds(layout: KVLayout) -> Sequence[tuple[KVKind, int]]:
    """Each kind, and its blocks in a slab."""
    return tuple(zip(layout.kinds, layout.blocks_per_slab, strict=True))
