"""Where keys and values lie, if layers need different memory: kinds of layers, and slabs that the kinds borrow.

A *kind* is the layers whose keys and values have one lifetime and one shape. A *slab* is a fixed piece of the cache,
lent to one kind at a time. Blocks of different kinds differ in bytes, so memory moves between kinds by whole slabs.

Arithmetic only. `model/kv_kinds.py` makes the kinds of a decoder; `stages/allocate` lends the slabs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
KindName = Literal["full", "window", "chunk", "latent"]

RUN_TOKENS = 256  # tokens of one sequence that should lie side by side, as a third faster to read on a CPU
ALIGNMENT = 64  # bytes; the distance of two blocks of a kind is a multiple, as far as its blocks' own size is
MOST_OF_CACHE = 256  # a slab is at most one of so many parts of the cache, if it then holds a block


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers whose keys and values have one lifetime and one shape."""

    name: KindName
    layers: tuple[int, ...]  # that write it, ascending; others may read the cache of one of them
    window: int | None  # most keys that a query sees, itself included; None: all. Of a chunk: its length
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_bytes: int  # of all its layers

    def first_key(self, positions: Ints) -> Ints:
        """The first key that the query at each position sees."""
        if self.window is None:
            return np.zeros_like(positions)
        if self.name == "chunk":
            return positions // self.window * self.window
        return np.maximum(positions - (self.window - 1), 0)

    def first_query_after(self, keys: Any) -> Any:
        """The first position whose query sees no key before `keys`, positions or one of them; for a window or chunk."""
        assert self.window is not None, "each query of a full kind sees all keys"
        if self.name == "chunk":
            return -(-keys // self.window) * self.window
        return keys + (self.window - 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A cache of K kinds in equal slabs.

    Kind 0 is the full kind if there is one. Block ids are dense within a kind: block `i` of slab `s` of kind `k` is
    `s * blocks_per_slab[k] + i`, and begins `block_stride(k)` bytes after the one before. The ids of a kind cover all
    slabs, so most are of no block at a time.

    With one kind, a slab is a run of blocks, of which the last may be cut off: see `num_blocks`.
    """

    kinds: tuple[KVKind, ...]
    block_size: int  # tokens of a block, of any kind
    slab_bytes: int
    num_slabs: int
    blocks_per_slab: tuple[int, ...]  # [K]
    num_blocks: tuple[int, ...]  # [K] ids of each kind
    place: tuple[tuple[int, int] | None, ...]  # [layers] (kind, place within its layers); None: the layer has no cache

    @property
    def has_windows(self) -> bool:
        """Whether the keys of some kind are given back while their sequence goes on."""
        return any(kind.window is not None for kind in self.kinds)

    @property
    def total_bytes(self) -> int:
        """Memory of all slabs."""
        return self.num_slabs * self.slab_bytes if len(self.kinds) > 1 else self.num_blocks[0] * self.block_stride(0)

    def block_stride(self, kind: int) -> int:
        """Bytes from one block of the kind to the next; over `block_bytes` by what a slab has left."""
        return self.slab_bytes // self.blocks_per_slab[kind]

    def most_blocks(self, kind: int, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks that one sequence of up to `num_tokens` tokens holds at once.

        `chunk` is the most tokens that one step computes of it. A window holds what the chunk's first token sees.
        """
        whole, window = -(-num_tokens // self.block_size), self.kinds[kind].window
        if window is None:
            return whole
        return min(whole, 1 + -(-(window - 2 + chunk) // self.block_size))  # window - 1 + chunk tokens, at any place

    def slabs_of_one(self, num_tokens: int, chunk: int = 1) -> int:
        """Slabs that one sequence of up to `num_tokens` tokens needs, alone in the cache."""
        needs = [self.most_blocks(kind, num_tokens, chunk) for kind in range(len(self.kinds))]
        return sum(-(-need // size) for need, size in zip(needs, self.blocks_per_slab, strict=True))

    def num_at_once(self, num_tokens: int, chunk: int = 1) -> int:
        """Sequences of `num_tokens` tokens each that the cache holds at once, of which a step computes `chunk` each."""
        needs = [self.most_blocks(kind, num_tokens, chunk) for kind in range(len(self.kinds))]
        if len(needs) == 1:
            return self.num_blocks[0] // needs[0]
        low, high = 0, self.num_slabs * max(self.blocks_per_slab)
        while low < high:  # they share slabs, of which each kind has whole ones
            count = (low + high + 1) // 2
            pairs = zip(needs, self.blocks_per_slab, strict=True)
            is_there = sum(-(-count * need // size) for need, size in pairs) <= self.num_slabs
            low, high = (count, high) if is_there else (low, count - 1)
        return low

    def num_tokens_at(self, length: int) -> int:
        """Tokens that the cache holds in sequences of `length` tokens each, by the share that each takes of a slab."""
        needs = [self.most_blocks(kind, length) for kind in range(len(self.kinds))]
        share = sum(need / size for need, size in zip(needs, self.blocks_per_slab, strict=True))
        slabs = self.num_slabs if len(self.kinds) > 1 else self.num_blocks[0] / self.blocks_per_slab[0]
        return int(slabs / share * length)

    def host_blocks(self, num_bytes: int, max_model_len: int) -> tuple[int, ...]:
        """Blocks of each kind for `num_bytes` of host memory, which kinds do not lend to one another.

        As many of each kind as sequences of four windows hold, or of `max_model_len`: longer ones fill the full kind
        first, shorter ones the windows.
        """
        windows = [kind.window for kind in self.kinds if kind.window is not None]
        length = min(max_model_len, 4 * max(windows, default=max_model_len))
        shares = [self.most_blocks(kind, length) for kind in range(len(self.kinds))]
        one = sum(share * kind.block_bytes for share, kind in zip(shares, self.kinds, strict=True))
        return tuple(share * num_bytes // one for share in shares)

    @classmethod
    def uniform(
        cls, kind: KVKind, block_size: int, num_blocks: int, place: Sequence[tuple[int, int] | None] | None = None
    ) -> KVLayout:
        """A cache of one kind, of `num_blocks` blocks. `place` is that of its layers, unless it is given."""
        run = max(1, RUN_TOKENS // block_size)
        places = _places([kind]) if place is None else place
        slabs = -(-num_blocks // run)
        return cls((kind,), block_size, run * kind.block_bytes, slabs, (run,), (num_blocks,), tuple(places))

    @classmethod
    def of(
        cls,
        kinds: Sequence[KVKind],
        block_size: int,
        num_bytes: int,
        place: Sequence[tuple[int, int] | None] | None = None,
    ) -> KVLayout:
        """The layout of a cache of `num_bytes`. `place` is that of the kinds' layers, unless it is given.

        A slab holds 256 to 512 tokens of the kind with the most bytes a token, by which the other kinds lose least; in
        a small cache fewer, so that the kinds have slabs to move.
        """
        if not kinds:
            raise ValueError("kinds: must be at least one")
        if len(kinds) == 1:
            return cls.uniform(kinds[0], block_size, num_bytes // kinds[0].block_bytes, place)
        largest = max(kind.block_bytes for kind in kinds)
        run = max(1, RUN_TOKENS // block_size)
        most = max(1, min(2 * run, num_bytes // MOST_OF_CACHE // largest))
        count = min(range(min(run, most), most + 1), key=lambda count: (_loss(kinds, count * largest), count))
        slab_bytes = count * largest
        sizes = tuple(_blocks_in(kind.block_bytes, slab_bytes) for kind in kinds)
        num_slabs = num_bytes // slab_bytes
        places = _places(kinds) if place is None else place
        num_blocks = tuple(num_slabs * size for size in sizes)
        return cls(tuple(kinds), block_size, slab_bytes, num_slabs, sizes, num_blocks, tuple(places))


class KVRoom(NamedTuple):
    """What a cache of K kinds can still give: blocks that kinds have, and slabs that move between them."""

    own: tuple[int, ...]  # [K] blocks in slabs of each kind that are free, or will be once the steps in flight are done
    idle: tuple[int, ...]  # [K] slabs that each kind can give up at most
    num_unlent: int  # slabs that no kind has
    blocks_per_slab: tuple[int, ...]  # [K]

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether each kind can have its `needs`, [K] blocks."""
        return self._num_left(needs) >= 0

    def most_of_first(self, needs: Sequence[int]) -> int:
        """The most blocks of kind 0 that fit beside the `needs` of the others, [K], of which the first is not read.

        -1 if the others do not fit.
        """
        left = self._num_left([self.own[0], *needs[1:]])
        if left >= 0:
            return self.own[0] + left * self.blocks_per_slab[0]
        kept = self.own[0] // self.blocks_per_slab[0]  # slabs of it that others could have, if they are idle
        if kept < -left or self.idle[0] < -left:
            return -1
        return self.own[0] + left * self.blocks_per_slab[0]

    def _num_left(self, needs: Sequence[int]) -> int:
        """Slabs that are left, or could be lent, once each kind has its `needs`; negative: so many are lacking."""
        left = self.num_unlent
        for need, has, idle, size in zip(needs, self.own, self.idle, self.blocks_per_slab, strict=True):
            left += min((has - need) // size, idle)  # rounded down, so that a lack counts as a whole slab
        return left


def _blocks_in(block_bytes: int, slab_bytes: int) -> int:
    """Blocks of a slab: as many as fit at a distance that divides the slab and is aligned as blocks are."""
    alignment = ALIGNMENT
    while block_bytes % alignment:
        alignment //= 2
    fits = range(slab_bytes // block_bytes, 0, -1)
    return next(count for count in fits if count == 1 or slab_bytes % (count * alignment) == 0)


def _loss(kinds: Sequence[KVKind], slab_bytes: int) -> float:
    """The largest share of a slab that a kind cannot use."""
    return max(1 - _blocks_in(kind.block_bytes, slab_bytes) * kind.block_bytes / slab_bytes for kind in kinds)


def _places(kinds: Sequence[KVKind]) -> Iterator[tuple[int, int] | None]:
    """The place of each layer up to the last that any kind has."""
    found = {layer: (k, i) for k, kind in enumerate(kinds) for i, layer in enumerate(kind.layers)}
    return (found.get(layer) for layer in range(1 + max(found)))
