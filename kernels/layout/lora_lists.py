"""Layouts of LoRA on a device: the tokens of a step by adapter, and the matrices of adapters in slots.

Adapters are in slots 1 to S; slot 0 stands for the base model, which adds nothing. A linear has up to MAX_PARTS parts,
runs of its rows, such as queries, keys and values: an adapter adds B (A x) to each, of a rank of its own, which is 0
for a part that it leaves alone.

N tokens of a step, padding included; S slots, P parts, R the largest rank, K inputs and M outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Array = Any  # a tensor, or a numpy array
Make = Callable[[tuple[int, ...], str], Array]  # an array of zeros of a shape and a type

MAX_PARTS = 3
TILE = 3  # numbers of a tile: adapter slot, first place in `order`, tokens
FEW_TOKENS = 256  # of a step whose sums are cut over K, as it has too few tiles for a device
FEW_TILE, MANY_TILE = 16, 32  # tokens of a tile, at most
MAX_CHUNKS = 8  # of K: each is summed on its own, then they are added in one order, in every form
LEAST_CHUNK = 256  # numbers of K


@dataclass(frozen=True, slots=True, eq=False)
class LoraLists:
    """The tokens of a step by adapter, which `LoraKernels.group_tokens` fills. Sized for the largest step.

    A tile is a run of `order` with one adapter. Tiles of adapters come first, those of the base model follow.
    """

    order: Array  # [N] i32 tokens by adapter slot, in their order; those of the base model last
    tiles: Array  # [W, TILE] i32
    counts: Array  # [2] i32: tiles of adapters; all tiles
    begins: Array  # [num_keys(S)] i32 memory for the kernel
    num_slots: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.order)

    @property
    def has_few(self) -> bool:
        """Whether the step is so small that its sums are cut over K."""
        return self.num_tokens <= FEW_TOKENS

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile, at most."""
        return FEW_TILE if self.has_few else MANY_TILE

    @property
    def most_tiles(self) -> int:
        """Tiles that any mix of adapters makes at most, with those of the base model."""
        return min(self.num_tokens, self.num_tokens // self.tile_tokens + self.num_slots + 1)

    def of(self, num_tokens: int) -> LoraLists:
        """The same memory, for a step of `num_tokens` tokens."""
        return replace(self, order=self.order[:num_tokens])


def make_lists(make: Make, max_tokens: int, num_slots: int) -> LoraLists:
    """Lists for steps of at most `max_tokens` tokens."""
    sizes = {min(FEW_TOKENS, max_tokens), max_tokens}
    most = max(min(size, size // FEW_TILE + num_slots + 1) for size in sizes)
    return LoraLists(
        order=make((max_tokens,), "int32"),
        tiles=make((most, TILE), "int32"),
        counts=make((2,), "int32"),
        begins=make((num_keys(num_slots),), "int32"),
        num_slots=num_slots,
    )


def num_keys(num_slots: int) -> int:
    """A power of two with room for each adapter, the base model, and tokens beyond the step."""
    return 1 << (num_slots + 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """The matrices of one linear, of all adapters in slots; slot s is at index s - 1. Ranks say what is in use.

    `a` and `b` are contiguous in K and M; what is beyond a rank is undefined.
    """

    a: Array  # [S, P, R, K]
    b: Array  # [S, R, M], the scale in it; each part has its own columns
    ranks: Array  # [S, P] i32
    sizes: tuple[int, ...]  # [P] rows of each part, M in total

    @property
    def max_rank(self) -> int:
        """R."""
        return int(self.a.shape[2])

    @property
    def num_inner(self) -> int:
        """K."""
        return int(self.a.shape[3])


def chunk_size(num_inner: int) -> int:
    """Numbers of K that are summed on their own: a multiple of LEAST_CHUNK."""
    return -(-num_inner // (MAX_CHUNKS * LEAST_CHUNK)) * LEAST_CHUNK


def num_chunks(num_inner: int) -> int:
    """How many chunks K makes, MAX_CHUNKS at most."""
    return -(-num_inner // chunk_size(num_inner))


def num_sums(lists: LoraLists, num_inner: int) -> int:
    """Partial sums that `LoraKernels.lora_shrink` leaves for each number: one a chunk in a small step, else one."""
    return num_chunks(num_inner) if lists.has_few else 1
