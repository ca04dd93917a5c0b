"""The prefix cache: which blocks hold which tokens, so that a prompt that begins like an earlier one is not computed.

Knows tokens and block ids. Refuses to know which blocks are in use (`blocks.py` does) and who asks.

The key of a block is a digest of the key before it and its own tokens; before the first stands a digest of the salt. A
key is only where to look: an entry is used if its tokens, and the entry before it, are the very same, so a digest that
collides costs a hit and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from .messages import Ints

MIN_TOKENS_TO_WAIT_FOR = 32  # fewer are computed again sooner than the K steps are over that one would wait

Digest = Callable[[bytes, bytes], bytes]  # (key before, tokens) -> key


@dataclass(slots=True, eq=False)
class _Entry:
    """A full block whose contents are complete. Equal to itself only; never changed."""

    block: int
    before: _Entry | str  # the entry of the block before it; for a first block the salt
    tokens: bytes  # [B] i32


@dataclass(slots=True)
class Chain:
    """One sequence's blocks, in order, as far as the cache knows them."""

    sequence_id: int
    token_ids: Ints  # [P + G] as it started
    num_known: int  # full blocks of them
    salt: str
    keys: list[bytes]  # of the full blocks of `token_ids`, as far as anybody asked; before them that of the salt
    last: _Entry | str  # the last block that was found or put in; at first the salt
    num_blocks: int = 0  # found or put in
    num_computing: int = 0  # full blocks of `token_ids` that are granted
    is_cut: bool = False  # another block took the place of one of these: nothing behind it can be found


class PrefixCache:
    """Finds and keeps the blocks of prompts and answers, block by block.

    `secret` makes keys differ from process to process, so that nobody can look for collisions; `digest` is for tests.
    """

    def __init__(self, block_size: int, secret: bytes = b"", digest: Digest | None = None) -> None:
        self.block_size = block_size
        self.min_tokens_to_wait_for = MIN_TOKENS_TO_WAIT_FOR
        self.num_queries = 0  # tokens looked up
        self.num_hits = 0  # tokens found
        self._secret = secret
        self.digest = digest or _sha256
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}  # by block
        self._computing: dict[bytes, int] = {}  # key -> sequence that computes the block now

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, sequence_id: int, token_ids: Ints, salt: str = "") -> Chain:
        """A sequence that has no block yet."""
        root = self.digest(self._secret, salt.encode())
        num_known = len(token_ids) // self.block_size
        return Chain(sequence_id, token_ids.astype(np.int32, copy=False), num_known, salt, [root], salt)

    # -- finding

    def find(self, chain: Chain) -> Ints:
        """The cached blocks that `chain` begins with, [C]; at least one token of it is left to compute. The chain goes
        on behind them."""
        most = (len(chain.token_ids) - 1) // self.block_size
        chain.last, chain.num_blocks, chain.is_cut = chain.salt, 0, False
        blocks: list[int] = []
        while len(blocks) < most:
            entry = self._entries.get(self._key(chain, len(blocks)))
            if entry is None or entry.before != chain.last or entry.tokens != self._tokens(chain, len(blocks)):
                break
            blocks.append(entry.block)
            chain.last = entry
        chain.num_blocks = len(blocks)
        return np.array(blocks, np.int32)

    def note_found(self, chain: Chain) -> None:
        """The blocks found were taken: counts the tokens of `chain` that were looked up and found."""
        self.num_queries += len(chain.token_ids)
        self.num_hits += chain.num_blocks * self.block_size

    def is_coming(self, chain: Chain) -> bool:
        """Whether another sequence computes what comes after the blocks found, and so much of it that it is worth
        waiting for."""
        most = (len(chain.token_ids) - 1) // self.block_size
        end = chain.num_blocks + -(-self.min_tokens_to_wait_for // self.block_size)
        if not self._computing or end > most:
            return False
        owners = (self._computing.get(self._key(chain, place)) for place in range(chain.num_blocks, end))
        return all(owner is not None and owner != chain.sequence_id for owner in owners)

    # -- putting in

    def begin(self, chain: Chain, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `chain` are computed or being computed."""
        num_full = min(num_tokens // self.block_size, chain.num_known)
        for place in range(max(chain.num_computing, chain.num_blocks), num_full):
            self._computing.setdefault(self._key(chain, place), chain.sequence_id)
        chain.num_computing = max(chain.num_computing, num_full)

    def put(self, chain: Chain, block: int, tokens: bytes | None = None) -> bool:
        """The next block of `chain` is complete and is `block`. Its `tokens` [B] i32 need to be said where they are
        not among those that the chain started with. True if the cache knows the block from now on."""
        place = chain.num_blocks
        if tokens is None:
            tokens = self._tokens(chain, place)
            key = self._key(chain, place)
            self._end_computing(chain, key)
        else:
            key = self.digest(chain.keys[-1], tokens)
            chain.keys.append(key)
        chain.num_blocks += 1
        if chain.is_cut:
            return False
        entry = self._entries.get(key)
        if entry is not None:  # somebody else has computed the same, or the digests collide
            chain.is_cut = entry.before != chain.last or entry.tokens != tokens
            chain.last = entry
            return False
        chain.last = self._entries[key] = _Entry(block, chain.last, tokens)
        self._keys[block] = key
        return True

    def drop(self, chain: Chain) -> None:
        """The sequence computes nothing more."""
        for place in range(chain.num_blocks, chain.num_computing):
            self._end_computing(chain, self._key(chain, place))
        chain.num_computing = 0

    # -- forgetting

    def forget(self, block: int) -> None:
        """The contents of `block` are given up."""
        del self._entries[self._keys.pop(block)]

    def clear(self) -> None:
        """Forgets every block. What is being computed goes on, and is not put in."""
        self._entries.clear()
        self._keys.clear()
        self._computing.clear()

    def blocks(self) -> set[int]:
        """The blocks whose contents are known."""
        return set(self._keys)

    def check(self) -> None:
        """Raises AssertionError unless each entry is found under the key of its tokens (I11)."""
        assert len(self._keys) == len(self._entries), "a block has no entry, or an entry no block"
        for block, key in self._keys.items():
            entry = self._entries[key]
            assert entry.block == block, f"block {block} is known by the entry of block {entry.block}"
            assert self._key_of(entry) == key, f"block {block} is known by a key that is not its tokens'"

    def _key_of(self, entry: _Entry) -> bytes:
        tokens = [entry.tokens]
        while isinstance(entry.before, _Entry):
            entry = entry.before
            tokens.append(entry.tokens)
        assert isinstance(entry.before, str)
        return reduce(self.digest, reversed(tokens), self.digest(self._secret, entry.before.encode()))

    # -- keys

    def _key(self, chain: Chain, place: int) -> bytes:
        while len(chain.keys) <= place + 1:
            chain.keys.append(self.digest(chain.keys[-1], self._tokens(chain, len(chain.keys) - 1)))
        return chain.keys[place + 1]

    def _tokens(self, chain: Chain, place: int) -> bytes:
        return chain.token_ids[place * self.block_size : (place + 1) * self.block_size].tobytes()

    def _end_computing(self, chain: Chain, key: bytes) -> None:
        if self._computing.get(key) == chain.sequence_id:
            del self._computing[key]


def _sha256(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()
