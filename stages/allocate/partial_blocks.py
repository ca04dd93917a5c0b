"""Which blocks on the device come behind which, token by token: for a sequence that goes on as another one did, but not
to the end of a block, so that it copies that block instead of computing what the two have in common.

Part of the prefix cache. Knows tokens and block ids. Refuses to know which blocks are in use, and who copies.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

MAX_FOLLOWERS_SEEN = 64  # of those that begin alike, the newest: the widest beam search grows as many at a time
TOKEN_BYTES = 4

Before = int | str  # what stands before a block: the number of the block there, or the salt (see prefix.py)


class Followers:
    """Blocks whose first tokens are known, by what stands before them and by their first token.

    A block is there whole, or as a *tail*: the first tokens of one that somebody has filled so far, or did fill before
    it ended. Whatever is written behind them, those stay as they are. At most `most_tails` are kept, the ones that were
    used last, so that blocks of which little is known leave room for whole ones.
    """

    def __init__(self) -> None:
        self.most_tails = 2**31 - 1
        self.tails: OrderedDict[int, tuple[Before, bytes]] = OrderedDict()  # by block, longest unused first
        # (what stands before, first token) -> block -> tokens, the newest last. Plain, so that the garbage collector
        # leaves them alone
        self._blocks: dict[tuple[Before, bytes], dict[int, bytes]] = {}

    def find(self, before: Before, tokens: bytes, least: int) -> tuple[int, int] | None:
        """The block that begins like `tokens`, behind `before`, for longest, and for how many of them, if that is for
        `least` or more. Looks at MAX_FOLLOWERS_SEEN at most, so that many that begin alike cost a hit and no time."""
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

    # -- putting in

    def add(self, block: int, before: Before, tokens: bytes) -> None:
        """`block`, of which nothing is known yet, begins with `tokens`, at least one."""
        self._blocks.setdefault((before, tokens[:TOKEN_BYTES]), {})[block] = tokens

    def add_tail(self, block: int, before: Before, tokens: bytes) -> list[int] | None:
        """The same for a block that is partly filled; None if that is of no use, as another one begins so. Returns the
        tails that are of none from now on, and gone: those that it goes on from, and who is one too many."""
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

    # -- forgetting

    def remove(self, block: int, before: Before, tokens: bytes) -> None:
        """`block`, which was added so, is given up."""
        where = before, tokens[:TOKEN_BYTES]
        known = self._blocks[where]
        del known[block]
        if not known:
            del self._blocks[where]

    def drop_tail(self, block: int) -> bool:
        """`block` is no tail any more. Whether it was one."""
        tail = self.tails.pop(block, None)
        if tail is not None:
            self.remove(block, *tail)
        return tail is not None

    def clear(self) -> None:
        """Forgets all."""
        self.tails.clear()
        self._blocks.clear()

    def known(self) -> dict[int, tuple[Before, bytes]]:
        """All blocks: what stands before them, and what they begin with."""
        return {
            block: (before, tokens) for (before, _), known in self._blocks.items() for block, tokens in known.items()
        }


def _num_common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with. As whole numbers, the lowest bit in which they differ says where they part."""
    size = min(len(one), len(other))
    parted = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return size // TOKEN_BYTES if not parted else ((parted & -parted).bit_length() - 1) // (8 * TOKEN_BYTES)
