"""An index of blocks by predecessor and first tokens, for matches shorter than a block.

Part of the prefix cache. A sequence that agrees with a known block for only some tokens copies that block instead of
computing those tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

MAX_FOLLOWERS_SEEN = 64  # newest candidates inspected per lookup; the widest beam search adds as many at a time
TOKEN_BYTES = 4

# The predecessor of a block: its number, or the salt for a first block (see `prefix_cache.py`); as bytes, and with one
# that no text has, where rotary factors are those of long sequences.
Before = int | str | bytes


class PartialBlocks:
    """Blocks whose first tokens are known, indexed by predecessor and first token.

    A block is indexed whole or as a *tail*: the tokens that a sequence had filled when the tail was added. Later writes
    to the block do not change those tokens. At most `most_tails` tails are kept, the most recently used, so that they
    do not displace whole blocks.
    """

    def __init__(self) -> None:
        self.most_tails = 2**31 - 1
        self.tails: OrderedDict[int, tuple[Before, bytes]] = OrderedDict()  # by block, least recently used first
        # (predecessor, first token) -> block -> tokens, the newest last. Plain values, so that the garbage collector
        # does not track them
        self._blocks: dict[tuple[Before, bytes], dict[int, bytes]] = {}

    def find(self, before: Before, tokens: bytes, least: int) -> tuple[int, int] | None:
        """The block after `before` with the longest common prefix, and its length.

        None if it is shorter than `least` tokens. Inspects at most MAX_FOLLOWERS_SEEN blocks, so that many similar
        blocks cost a hit at worst, not time.
        """
        best, most = None, least - 1
        for block, known in self._newest(before, tokens):
            count = _num_common(known, tokens)
            if count > most:
                best, most = block, count
                if TOKEN_BYTES * count == len(tokens):
                    break
        if best is None:
            return None
        if best in self.tails:
            self.tails.move_to_end(best)
        return best, most

    def _newest(self, before: Before, tokens: bytes) -> list[tuple[int, bytes]]:
        known = self._blocks.get((before, tokens[:TOKEN_BYTES]))
        return [] if known is None else list(islice(reversed(known.items()), MAX_FOLLOWERS_SEEN))

    # -- adding

    def add(self, block: int, before: Before, tokens: bytes) -> None:
        """Adds `block`, which must not be indexed yet and begins with `tokens`, at least one."""
        where = before, tokens[:TOKEN_BYTES]
        known = self._blocks.get(where)
        if known is None:
            self._blocks[where] = {block: tokens}  # mostly it is the only one
        else:
            known[block] = tokens

    def add_tail(self, block: int, before: Before, tokens: bytes) -> list[int] | None:
        """Adds a partly filled block.

        Returns the tails dropped for it; None if another block begins with `tokens`. Dropped are tails that `tokens`
        extends, and the least recently used ones beyond `most_tails`.
        """
        gone = []
        for other, known in self._newest(before, tokens):
            if known.startswith(tokens):
                return None
            if other in self.tails and tokens.startswith(known):
                gone.append(other)
        for other in gone:
            self.drop_tail(other)
        self.tails[block] = before, tokens
        self.add(block, before, tokens)
        while len(self.tails) > self.most_tails:
            oldest = next(iter(self.tails))
            self.drop_tail(oldest)
            gone.append(oldest)
        return gone

    # -- removing

    def remove(self, block: int, before: Before, tokens: bytes) -> None:
        """Removes `block`, which was added with the same arguments."""
        where = before, tokens[:TOKEN_BYTES]
        known = self._blocks[where]
        del known[block]
        if not known:
            del self._blocks[where]

    def drop_tail(self, block: int) -> bool:
        """Removes `block` if it is a tail. Returns whether it was one."""
        tail = self.tails.pop(block, None)
        if tail is not None:
            self.remove(block, *tail)
        return tail is not None

    def clear(self) -> None:
        """Removes all blocks."""
        self.tails.clear()
        self._blocks.clear()

    def known(self) -> dict[int, tuple[Before, bytes]]:
        """All blocks, with their predecessor and first tokens."""
        return {
            block: (before, tokens) for (before, _), known in self._blocks.items() for block, tokens in known.items()
        }


def _num_common(one: bytes, other: bytes) -> int:
    """The number of common first tokens.

    As little-endian integers, the lowest differing bit gives it.
    """
    size = min(len(one), len(other))
    parted = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return size // TOKEN_BYTES if not parted else ((parted & -parted).bit_length() - 1) // (8 * TOKEN_BYTES)
