"""The prefixes of the last prompts, to show which engine is warm for which: no text, and no tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_PROMPTS = 64  # the last ones
MAX_BLOCKS = 512  # of each, from its beginning
MAX_NODES = 40  # shown: those of most tokens in most prompts


class PrefixNode(NamedTuple):
    """A run of blocks that the same prompts share: the end of a prefix of `num_blocks`."""

    key: bytes  # of its last block
    parent: bytes | None  # the node before it; None: it is at the beginning
    first_block: int
    num_blocks: int  # from the beginning of the prompts to its end
    num_prompts: int  # of the last ones
    keys: Sequence[bytes]  # of all blocks from the beginning to its end


class RecentPrefixes:
    """Remembers the keys of the last prompts. A note costs a tenth of a microsecond: nothing is copied."""

    def __init__(self) -> None:
        self._chains: deque[Sequence[bytes]] = deque(maxlen=MAX_PROMPTS)

    def note(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent to an engine."""
        if keys:
            self._chains.append(keys)

    def nodes(self) -> list[PrefixNode]:
        """The tree of the prompts: the largest nodes, with all before them, and parents first.

        A key stands for its block and all before it. So two prompts with the same key have the same prefix.
        """
        chains = [keys[:MAX_BLOCKS] for keys in self._chains]
        counts: Counter[bytes] = Counter()
        for keys in chains:
            counts.update(keys)
        found: dict[bytes, PrefixNode] = {}
        for keys in chains:
            parent: bytes | None = None
            first = 0
            for end in range(1, len(keys) + 1):
                if end == len(keys) or counts[keys[end]] != counts[keys[end - 1]]:
                    key = keys[end - 1]
                    found.setdefault(key, PrefixNode(key, parent, first, end, counts[key], keys[:end]))
                    parent, first = key, end

        def weight(node: PrefixNode) -> tuple[int, bytes]:
            return -node.num_prompts * (node.num_blocks - node.first_block), node.key

        largest = sorted(found.values(), key=weight)
        kept: set[bytes] = set()
        for node in largest[:MAX_NODES]:
            at: bytes | None = node.key
            while at is not None and at not in kept:
                kept.add(at)
                at = found[at].parent
        return [node for node in found.values() if node.key in kept]
