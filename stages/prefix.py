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

import numpy as np

from .messages import Ints

MIN_TOKENS_TO_WAIT_FOR = 32  # fewer are computed again sooner than the K steps are over that one would wait

Digest = Callable[[bytes, bytes], bytes]  # (key before, tokens) -> key


# What is known of a full block: its key; what stands before it, which is the number that the block before was given
# when it was put in, and for a first block the salt; its tokens [B] i32; its own number. A plain tuple, as the garbage
# collector leaves those alone: there is one for each block of the pool.
_Entry = tuple[bytes, int | str, bytes, int]


@dataclass(slots=True)
class Chain:
    """One sequence's blocks, in order, as far as the cache knows them."""

    sequence_id: int
    token_ids: Ints  # [P + G] as it started
    num_known: int  # full blocks of them
    salt: str
    keys: list[bytes]  # of the full blocks of `token_ids`, as far as anybody asked; before them that of the salt
    last: int | str  # number of the last block that was found or put in; at first the salt
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
        self._entries: dict[int, _Entry] = {}  # by block
        self._blocks: dict[bytes, int] = {}  # by key
        self._num_put = 0
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
            block = self._blocks.get(self._key(chain, len(blocks)))
            if block is None:
                break
            _, before, tokens, number = self._entries[block]
            if before != chain.last or tokens != self._tokens(chain, len(blocks)):
                break
            blocks.append(block)
            chain.last = number
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
        known = self._blocks.get(key)
        if known is not None:  # somebody else has computed the same, or the digests collide
            _, before, contents, number = self._entries[known]
            chain.is_cut = before != chain.last or contents != tokens
            chain.last = number
            return False
        self._num_put += 1
        self._blocks[key], self._entries[block] = block, (key, chain.last, tokens, self._num_put)
        chain.last = self._num_put
        return True

    def drop(self, chain: Chain) -> None:
        """The sequence computes nothing more."""
        for place in range(chain.num_blocks, chain.num_computing):
            self._end_computing(chain, self._key(chain, place))
        chain.num_computing = 0

    # -- forgetting

    def forget(self, block: int) -> None:
        """The contents of `block` are given up."""
        del self._blocks[self._entries.pop(block)[0]]

    def clear(self) -> None:
        """Forgets every block. What is being computed goes on, and is not put in."""
        self._entries.clear()
        self._blocks.clear()
        self._computing.clear()

    def blocks(self) -> set[int]:
        """The blocks whose contents are known."""
        return set(self._entries)

    def check(self) -> None:
        """Raises AssertionError unless each entry is found under the key of its tokens (I11)."""
        assert len(self._blocks) == len(self._entries), "a block has no key, or a key no block"
        keys = {number: key for key, _, _, number in self._entries.values()}
        for block, (key, before, tokens, _) in self._entries.items():
            assert self._blocks.get(key) == block, f"block {block} is known by the key of block {self._blocks.get(key)}"
            root = self.digest(self._secret, before.encode()) if isinstance(before, str) else keys.get(before)
            if root is not None:  # else the block before was forgotten, and this one can not be found
                assert self.digest(root, tokens) == key, f"block {block} is known by a key that is not its tokens'"

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
