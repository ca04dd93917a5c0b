"""Blocks that admission can give to waiting sequences: of one kind of memory, or of several that share slabs.

An estimate: what running sequences will need is counted as taken.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...kernels.layout.kv_layout import KVLayout, KVRoom
from ..messages import Ints


class SpareBlocks(Protocol):
    """Blocks of kind 0 for the sequences that are admitted one after another."""

    def for_tokens(self, num_tokens: int) -> int:
        """The most blocks of kind 0 that the next sequence can have, if it starts with so many tokens."""

    def take(self, num_tokens: int) -> None:
        """A sequence is admitted: it takes the blocks of its tokens, and of one more block of tokens as it grows."""


class SpareOfOneKind:
    """Of one kind, a number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size

    def for_tokens(self, num_tokens: int) -> int:
        return self._num_blocks

    def take(self, num_tokens: int) -> None:
        self._num_blocks -= -(-num_tokens // self._block_size) + 1


class SpareOfKinds:
    """Of several kinds: each needs blocks, and what is left of slabs goes to kind 0."""

    def __init__(self, layout: KVLayout, room: KVRoom, *, splits_prompts: bool) -> None:
        """`splits_prompts`: whether a step may compute a part of a prompt; else its windows hold all of it at once."""
        self._layout, self._room, self._splits_prompts = layout, room, splits_prompts
        self._taken = [0] * len(layout.kinds)  # blocks of each kind

    def for_tokens(self, num_tokens: int) -> int:
        needs = [taken + need for taken, need in zip(self._taken, self._needs(num_tokens), strict=True)]
        most = self._room.most_of_first(needs)
        return most if most < 0 else most - self._taken[0]

    def take(self, num_tokens: int) -> None:
        for kind, need in enumerate(self._needs(num_tokens + self._layout.block_size)):
            self._taken[kind] += need

    def count_rows(self, num_computed: Ints, num_tokens: Ints) -> None:
        """Counts what running rows lack: they have computed [R] tokens, and come to `num_tokens` [R]."""
        for kind, (has, need) in enumerate(zip(self._held(num_computed), self._held(num_tokens), strict=True)):
            self._taken[kind] += need - has

    def count_parked(self, num_computed: Ints) -> None:
        """Counts the blocks of parked rows, which have computed [R] tokens, as there for others."""
        for kind, held in enumerate(self._held(num_computed)):
            self._taken[kind] -= held

    def _needs(self, num_tokens: int) -> list[int]:
        chunk = 1 if self._splits_prompts else num_tokens
        return [self._layout.most_blocks(kind, num_tokens, chunk) for kind in range(len(self._taken))]

    def _held(self, num_tokens: Ints) -> list[int]:
        """The sums of blocks, of each kind, that rows with so many tokens hold."""
        size, longest = self._layout.block_size, int(num_tokens.max(initial=0))
        whole = -(-num_tokens // size)
        return [
            int(np.minimum(whole, self._layout.most_blocks(kind, longest)).sum()) for kind in range(len(self._taken))
        ]
