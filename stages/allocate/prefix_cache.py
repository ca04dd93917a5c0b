"""The prefix cache: which blocks hold which tokens, so that a prompt that begins like an earlier one is not computed.

Knows tokens and block ids. Refuses to know which blocks are in use (`block_pool.py` does) and who asks.

The key of a block is a digest of the key before it and its own tokens; before the first stands a digest of the salt. A
key is only where to look: an entry is used if its tokens, and the entry before it, are the very same, so a digest that
collides costs a hit and never a wrong answer. Where no whole block goes on as a sequence does, one that does so for
some tokens is found by those (`partial_blocks.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..messages import Ints
from .offload_policy import is_sampled
from .partial_blocks import TOKEN_BYTES, Followers

MIN_TOKENS_TO_WAIT_FOR = 32  # fewer are computed again sooner than the K steps are over that one would wait
# Fewer are mostly alike by chance, and each copy makes what it is made of the last that is evicted; but if one is left
# to compute, the row is as cheap as a decoding one
MIN_TOKENS_TO_FORK = 4

Digest = Callable[[bytes, bytes], bytes]  # (key before, tokens) -> key


# What is known of a full block: its key; what stands before it, which is the number that the block before was given
# when it was put in, and for a first block the salt; its tokens [B] i32; its own number; whether it is a sample (see
# `offload_policy.py`). A plain tuple, as the garbage collector leaves those alone: there is one for each block of the
# pool.
_Entry = tuple[bytes, int | str, bytes, int, bool]


class _Tier:
    """What is known of the blocks of one memory, the device's or the host's."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by block
        self.blocks: dict[bytes, int] = {}  # by key

    def find(self, key: bytes, before: int | str, tokens: bytes) -> tuple[int, int] | None:
        """The block of that key and its number, if it holds these very tokens behind that very block."""
        block = self.blocks.get(key)
        if block is None:
            return None
        _, known_before, known_tokens, number, _ = self.entries[block]
        return (block, number) if known_before == before and known_tokens == tokens else None

    def put(self, block: int, entry: _Entry) -> None:
        self.entries[block], self.blocks[entry[0]] = entry, block

    def pop(self, block: int) -> _Entry:
        entry = self.entries.pop(block)
        del self.blocks[entry[0]]
        return entry

    def clear(self) -> None:
        self.entries.clear()
        self.blocks.clear()


@dataclass(slots=True)
class Chain:
    """One sequence's blocks, in order, as far as the cache knows them."""

    sequence_id: int
    token_ids: Ints  # [P + G] as it started
    contents: bytes  # the same, i32
    num_known: int  # full blocks of them
    is_sample: bool  # its blocks are (see `offload_policy.py`)
    salt: str
    keys: list[bytes]  # of the full blocks of `token_ids`, as far as anybody asked; before them that of the salt
    last: int | str  # number of the last block that was found or put in; at first the salt
    num_blocks: int = 0  # found on the device or put in
    num_on_host: int = 0  # blocks found there, behind those
    num_forked: int = 0  # tokens found behind all these, in a block that goes on differently
    num_computing: int = 0  # full blocks of `token_ids` that are granted
    is_cut: bool = False  # another block took the place of one of these: nothing behind it can be found


class Found(NamedTuple):
    """What a sequence begins with, in this order."""

    shared: Ints  # [C] blocks on the device
    on_host: Ints  # [H] blocks on the host
    source: int | None  # a block on the device: its first `num_forked` tokens come next, to be copied
    num_forked: int  # less than a block


class PrefixCache:
    """Finds and keeps the blocks of prompts and answers, block by block.

    `secret` makes keys differ from process to process, so that nobody can look for collisions; `digest` is for tests.
    """

    def __init__(self, block_size: int, secret: bytes = b"", digest: Digest | None = None) -> None:
        self.block_size = block_size
        self._block_bytes = TOKEN_BYTES * block_size
        self.min_tokens_to_wait_for = MIN_TOKENS_TO_WAIT_FOR
        self.min_tokens_to_fork = MIN_TOKENS_TO_FORK
        self.num_queries = 0  # tokens looked up
        self.num_hits = 0  # tokens found
        self.num_host_hits = 0  # of them, on the host
        self.num_forked = 0  # of them, in blocks that are copied as they go on differently
        self._secret = secret
        self.digest = digest or _sha256
        self._device, self._host = _Tier(), _Tier()
        self.followers = Followers()  # the blocks on the device, and those that are partly filled
        self._num_put = 0
        self._computing: dict[bytes, int] = {}  # key -> sequence that computes the block now

    def __len__(self) -> int:
        """Blocks on the device whose contents are known."""
        return len(self._device.entries) + len(self.followers.tails)

    def chain(self, sequence_id: int, token_ids: Ints, salt: str = "") -> Chain:
        """A sequence that has no block yet."""
        root = self.digest(self._secret, salt.encode())
        num_known = len(token_ids) // self.block_size
        token_ids = token_ids.astype(np.int32, copy=False)
        contents = token_ids.tobytes()
        return Chain(sequence_id, token_ids, contents, num_known, is_sampled(sequence_id), salt, [root], salt)

    # -- finding

    def find(self, chain: Chain, *, may_fork: bool = True) -> Found:
        """What `chain` begins with. At least one token of it is left to compute. The chain goes on behind the blocks on
        the device."""
        chain.last, chain.num_blocks, chain.num_on_host, chain.is_cut = chain.salt, 0, 0, False
        blocks, last = self._run(chain, self._device, 0, chain.salt)
        chain.num_blocks, chain.last = len(blocks), last
        places: list[int] = []
        if self._host.entries:
            places, last = self._run(chain, self._host, len(blocks), last)
            chain.num_on_host = len(places)
        source, chain.num_forked = (may_fork and self._fork(chain, last)) or (None, 0)
        return Found(np.array(blocks, np.int32), np.array(places, np.int32), source, chain.num_forked)

    def _fork(self, chain: Chain, last: int | str) -> tuple[int, int] | None:
        """The block that goes on for longest as `chain` does behind `last`, and for how many tokens."""
        begin = (chain.num_blocks + chain.num_on_host) * self.block_size
        end = min(begin + self.block_size, len(chain.token_ids) - 1)
        if begin >= end:
            return None
        least = min(self.min_tokens_to_fork, end - begin)
        return self.followers.find(last, chain.contents[TOKEN_BYTES * begin : TOKEN_BYTES * end], least)

    def _run(self, chain: Chain, tier: _Tier, place: int, last: int | str) -> tuple[list[int], int | str]:
        """The blocks of a tier that hold what `chain` has from `place` on, as many as follow each other; and the number
        of the last."""
        most, blocks = (len(chain.token_ids) - 1) // self.block_size, []
        while place < most:
            found = tier.find(self._key(chain, place), last, self._tokens(chain, place))
            if found is None:
                break
            block, last = found
            blocks.append(block)
            place += 1
        return blocks, last

    def note_found(self, chain: Chain) -> None:
        """The blocks found were taken: counts the tokens of `chain` that were looked up and found."""
        self.num_queries += len(chain.token_ids)
        self.num_hits += (chain.num_blocks + chain.num_on_host) * self.block_size + chain.num_forked
        self.num_host_hits += chain.num_on_host * self.block_size
        self.num_forked += chain.num_forked

    def is_coming(self, chain: Chain) -> bool:
        """Whether another sequence computes what comes after the blocks found, and so much of it that it is worth
        waiting for."""
        most = (len(chain.token_ids) - 1) // self.block_size
        begin = chain.num_blocks + chain.num_on_host
        end = begin + -(-self.min_tokens_to_wait_for // self.block_size)
        if not self._computing or end > most:
            return False
        owners = (self._computing.get(self._key(chain, place)) for place in range(begin, end))
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
        if key in self._device.blocks:  # somebody else has computed the same, or the digests collide
            known = self._device.find(key, chain.last, tokens)
            chain.is_cut = known is None
            chain.last = chain.last if known is None else known[1]
            return False
        on_host = self._host.find(key, chain.last, tokens) if self._host.blocks else None
        if on_host is None:
            self._num_put += 1
        number = self._num_put if on_host is None else on_host[1]  # what stands behind it there goes on being found
        self._device.put(block, (key, chain.last, tokens, number, chain.is_sample))
        self.followers.add(block, chain.last, tokens)
        chain.last = number
        return True

    def put_tail(self, chain: Chain, block: int, tokens: bytes) -> list[int] | None:
        """What comes behind the blocks of `chain` that were found or put in is the beginning of `block`, which holds
        these `tokens`, less than a block of them, now and whatever is written behind them. Returns the tails that are
        forgotten for it; None if that is of no use to anybody."""
        if chain.is_cut or not tokens:
            return None
        return self.followers.add_tail(block, chain.last, tokens)

    def drop_tail(self, block: int) -> bool:
        """`block` is whole, or given up: it is no tail. Whether it was one."""
        return self.followers.drop_tail(block)

    def drop(self, chain: Chain) -> None:
        """The sequence computes nothing more."""
        for place in range(chain.num_blocks, chain.num_computing):
            self._end_computing(chain, self._key(chain, place))
        chain.num_computing = 0

    # -- forgetting

    def forget(self, block: int) -> None:
        """The contents of `block` on the device are given up."""
        if not self.drop_tail(block):
            self._pop(block)

    def _pop(self, block: int) -> _Entry:
        entry = self._device.pop(block)
        self.followers.remove(block, entry[1], entry[2])
        return entry

    def is_tail(self, block: int) -> bool:
        """Whether only the beginning of `block` on the device is known."""
        return block in self.followers.tails

    def is_on_host(self, block: int) -> bool:
        """Whether the host has the same as `block` on the device."""
        key, before, tokens, _, _ = self._device.entries[block]
        return self._host.find(key, before, tokens) is not None

    def is_sample(self, block: int) -> bool:
        """Whether `block` on the device is moved to the host even where that does not pay."""
        return self._device.entries[block][4]

    def move_out(self, block: int, place: int) -> int | None:
        """What is in `block` on the device will be in block `place` on the host, and there alone. Returns the block
        there whose contents had the same key and are forgotten for it, if there was one."""
        entry = self._pop(block)
        displaced = self._host.blocks.get(entry[0])
        if displaced is not None:
            self._host.pop(displaced)
        self._host.put(place, entry)
        return displaced

    def forget_on_host(self, place: int) -> None:
        """The contents of block `place` on the host are given up, if they are known."""
        if place in self._host.entries:
            self._host.pop(place)

    def clear(self) -> None:
        """Forgets every block. What is being computed goes on, and is not put in."""
        self._device.clear()
        self._host.clear()
        self.followers.clear()
        self._computing.clear()

    def blocks(self) -> set[int]:
        """The blocks on the device whose contents are known."""
        return set(self._device.entries) | set(self.followers.tails)

    def places(self) -> set[int]:
        """The blocks on the host whose contents are known."""
        return set(self._host.entries)

    def check(self) -> None:
        """Raises AssertionError unless each entry is found under the key of its tokens (I11)."""
        keys = {entry[3]: entry[0] for tier in (self._device, self._host) for entry in tier.entries.values()}
        for tier in (self._device, self._host):
            self._check_tier(tier, keys)
        whole = {block: (entry[1], entry[2]) for block, entry in self._device.entries.items()}
        assert self.followers.known() == whole | self.followers.tails, "a block is not found by what it begins with"
        assert whole.keys().isdisjoint(self.followers.tails), "a block is known whole and in part"
        assert len(self.followers.tails) <= self.followers.most_tails, "there are more tails than may be"

    def _check_tier(self, tier: _Tier, keys: dict[int, bytes]) -> None:
        assert len(tier.blocks) == len(tier.entries), "a block has no key, or a key no block"
        for block, (key, before, tokens, _, _) in tier.entries.items():
            assert tier.blocks.get(key) == block, f"block {block} is known by the key of block {tier.blocks.get(key)}"
            root = self.digest(self._secret, before.encode()) if isinstance(before, str) else keys.get(before)
            if root is not None:  # else the block before was forgotten, and this one can not be found
                assert self.digest(root, tokens) == key, f"block {block} is known by a key that is not its tokens'"

    # -- keys

    def _key(self, chain: Chain, place: int) -> bytes:
        keys = chain.keys
        while len(keys) <= place + 1:
            keys.append(self.digest(keys[-1], self._tokens(chain, len(keys) - 1)))
        return keys[place + 1]

    def _tokens(self, chain: Chain, place: int) -> bytes:
        begin = place * self._block_bytes
        return chain.contents[begin : begin + self._block_bytes]

    def _end_computing(self, chain: Chain, key: bytes) -> None:
        if self._computing.get(key) == chain.sequence_id:
            del self._computing[key]


def _sha256(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()
