"""The prefix cache: an index from tokens to the blocks that hold their keys and values.

`block_pool.py` knows which blocks are in use. The key of a block is a digest of the previous block's key and its own
tokens; the first block uses a digest of the salt as previous key. A key only locates an entry. The entry is used only
if its tokens and its predecessor are identical, so a collision costs a hit and never gives a wrong answer. If no whole
block matches, a block that matches in part is looked up by its first tokens (`partial_blocks.py`).

With several kinds of memory, entries are those of kind 0, which holds the blocks of a sequence the longest. The blocks
of the other kinds are found by an entry's number (`kind_index.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kernels.layout.state_layout import StateLayout
from ..messages import Ints
from .key_changes import KeyChanges
from .kind_index import KindIndex, num_usable
from .partial_blocks import TOKEN_BYTES, Before, PartialBlocks
from .state_snapshots import StateSnapshots
from .tiers.offload_policy import is_sampled
from .tiers.plan_in_hand import KindMatch

MIN_TOKENS_TO_WAIT_FOR = 32  # computing fewer tokens takes less time than waiting for K steps
# Shorter matches are mostly chance, and each copy keeps its source from being evicted. A shorter one is still used if
# it leaves a single token to compute, as the row is then as cheap as a decode.
MIN_TOKENS_TO_FORK = 4

LONG = b"\xff"  # follows the salt of sequences with the rotary factors of long ones; no text in UTF-8 holds it
ADAPTER = b"\xfe"  # the digest of an adapter follows; no text in UTF-8 holds it either

Digest = Callable[[bytes, bytes], bytes]  # (previous key, tokens) -> key


# A full block: its key; its predecessor (the number of the previous block, or the salt for a first block); its tokens
# [B] i32; its own number, assigned when it was added; whether it is sampled (see `offload_policy.py`). A plain tuple,
# as there is one per block of the pool and the garbage collector does not track such tuples.
_Entry = tuple[bytes, Before, bytes, int, bool]


class _Tier:
    """The known blocks of one memory, the device's or the host's."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by block
        self.blocks: dict[bytes, int] = {}  # by key
        self.changes: KeyChanges | None = None  # told of each key that comes or goes

    def find(self, key: bytes, before: Before, tokens: bytes) -> tuple[int, int] | None:
        """The block with that key and its number, if its tokens and its predecessor are identical."""
        block = self.blocks.get(key)
        if block is None:
            return None
        _, known_before, known_tokens, number, _ = self.entries[block]
        return (block, number) if known_before == before and known_tokens == tokens else None

    def put(self, block: int, entry: _Entry) -> None:
        self.entries[block], self.blocks[entry[0]] = entry, block
        if self.changes is not None:
            self.changes.add(entry[0])

    def pop(self, block: int) -> _Entry:
        entry = self.entries.pop(block)
        del self.blocks[entry[0]]
        if self.changes is not None:
            self.changes.remove((entry[0],))
        return entry

    def clear(self) -> None:
        if self.changes is not None:
            self.changes.remove(self.blocks)
        self.entries.clear()
        self.blocks.clear()


@dataclass(slots=True)
class BlockChain:
    """The blocks of one sequence, in order, as far as the cache holds them."""

    sequence_id: int
    token_ids: Ints  # [P + G] at its start
    contents: bytes  # the same, as i32 bytes
    num_known: int  # full blocks of `token_ids`
    is_sample: bool  # whether its blocks are sampled (see `offload_policy.py`)
    salt: Before
    keys: list[bytes]  # that of the salt, then those of full blocks of `token_ids`, computed on demand
    last: Before  # number of the last block found or added; at first the salt
    num_blocks: int = 0  # blocks found on the device or added
    num_on_host: int = 0  # blocks found on the host, after those
    num_forked: int = 0  # tokens found after all these, in a partly matching block
    num_computing: int = 0  # full blocks of `token_ids` granted so far
    is_cut: bool = False  # one of its blocks could not be added: nothing after it can be found
    snapshot: int | None = None  # number of the entry behind which it took its last snapshot


class PrefixMatch(NamedTuple):
    """The cached tokens with which a sequence starts, in this order."""

    shared: Ints  # [C] blocks on the device
    on_host: Ints  # [H] blocks on the host
    source: int | None  # a device block whose first `num_forked` tokens come next, to be copied
    num_forked: int  # less than a block of tokens
    more: tuple[KindMatch, ...] = ()  # of the kinds from 1 on
    snapshot: int | None = None  # place of the recurrent state behind these tokens


class PrefixCache:
    """Looks up and adds the blocks of prompts and answers, block by block.

    `secret` makes keys differ between processes, so that clients cannot search for collisions. `digest` is for tests.
    `states`: of a model with recurrent layers, where a prefix is found only as far as there is a snapshot behind it.
    """

    def __init__(
        self,
        block_size: int,
        secret: bytes = b"",
        digest: Digest | None = None,
        states: StateLayout | None = None,
    ) -> None:
        self.block_size = block_size
        self._block_bytes = TOKEN_BYTES * block_size
        self.min_tokens_to_wait_for = MIN_TOKENS_TO_WAIT_FOR
        self.min_tokens_to_fork = MIN_TOKENS_TO_FORK
        self.num_queries = 0  # tokens looked up
        self.num_hits = 0  # tokens found, in total
        self.num_host_hits = 0  # of the hits, on the host
        self.num_forked = 0  # of the hits, in partly matching blocks that are copied
        self._secret = secret
        self.digest = digest or _sha256
        self._device, self._host = _Tier(), _Tier()
        self.partial_blocks = PartialBlocks()  # all device blocks by their first tokens, partly filled ones included
        self.kinds: Sequence[KindIndex] = ()  # from kind 1 on
        self.snapshots = None if states is None else StateSnapshots(states, block_size)
        self._num_put = 0
        self._computing: dict[bytes, int] = {}  # key -> sequence that is computing the block

    def __len__(self) -> int:
        """Number of device blocks with known contents."""
        return len(self._device.entries) + len(self.partial_blocks.tails)

    def chain(
        self, sequence_id: int, token_ids: Ints, salt: str = "", *, is_long: bool = False, adapter: str = ""
    ) -> BlockChain:
        """The chain of a sequence that has no blocks yet.

        `is_long`: it shares none with sequences that are not. It shares them only with sequences of its `adapter`.
        """
        first: str | bytes = salt.encode() + LONG if is_long else salt
        if adapter:
            first = salt.encode() + (LONG if is_long else b"") + ADAPTER + adapter.encode()
        root = self._root(first)
        num_known = len(token_ids) // self.block_size
        token_ids = token_ids.astype(np.int32, copy=False)
        contents = token_ids.tobytes()
        return BlockChain(sequence_id, token_ids, contents, num_known, is_sampled(sequence_id), first, [root], first)

    # -- lookup

    def find(self, chain: BlockChain, *, may_fork: bool = True) -> PrefixMatch:
        """The cached tokens with which `chain` starts, leaving at least one to compute.

        Repositions the chain after the blocks found on the device.
        """
        self.restart(chain)
        blocks, last = self._run(chain, self._device, 0, chain.salt)
        chain.num_blocks, chain.last = len(blocks), last
        places: list[int] = []
        if self._host.entries:
            places, last = self._run(chain, self._host, len(blocks), last)
            chain.num_on_host = len(places)
        if self.kinds or self.snapshots is not None:
            return self._find_of_kinds(chain, blocks, places, may_fork=may_fork)
        source, chain.num_forked = (may_fork and self._fork(chain, last)) or (None, 0)
        return PrefixMatch(np.array(blocks, np.int32), np.array(places, np.int32), source, chain.num_forked)

    def restart(self, chain: BlockChain) -> None:
        """Repositions the chain at its beginning."""
        chain.last, chain.num_blocks, chain.num_on_host, chain.is_cut = chain.salt, 0, 0, False
        chain.num_forked = 0

    def _find_of_kinds(self, chain: BlockChain, blocks: list[int], places: list[int], *, may_fork: bool) -> PrefixMatch:
        """Cuts a match of kind 0 to the longest one that every kind has, and repositions the chain after it.

        With recurrent layers, to the longest one with a snapshot.
        """
        numbers = [self._device.entries[block][3] for block in blocks]
        numbers += [self._host.entries[place][3] for place in places]
        if self.snapshots is not None:
            if may_fork and (found := self._find_end(chain, numbers, blocks, places, self.snapshots)) is not None:
                return found
            may_fork = False
        snapshot = self._cut(numbers)
        blocks, places = blocks[: len(numbers)], places[: max(0, len(numbers) - len(blocks))]
        chain.num_blocks, chain.num_on_host = len(blocks), len(places)
        chain.last = numbers[len(blocks) - 1] if blocks else chain.salt
        source, chain.num_forked = (may_fork and self._fork(chain, numbers[-1] if numbers else chain.salt)) or (None, 0)
        sources = [None if source is None else self._source_of(index, source) for index in self.kinds]
        if source is not None and None in sources:
            source, chain.num_forked, sources = None, 0, [None] * len(sources)
        more = tuple(index.match(numbers, each) for index, each in zip(self.kinds, sources, strict=True))
        arrays = np.array(blocks, np.int32), np.array(places, np.int32)
        return PrefixMatch(*arrays, source, chain.num_forked, more, snapshot)

    def _find_end(
        self, chain: BlockChain, numbers: list[int], blocks: list[int], places: list[int], snapshots: StateSnapshots
    ) -> PrefixMatch | None:
        """The match up to the end of an answer behind all entries of the chain, if the cache has one."""
        last = numbers[-1] if numbers else chain.salt
        begin = len(numbers) * self.block_size
        most = min(begin + self.block_size, len(chain.token_ids)) - 1  # the last token is always computed
        end = snapshots.tail(last, chain.contents[TOKEN_BYTES * begin : TOKEN_BYTES * most])
        if end is None or num_usable(self.kinds, numbers) < len(numbers):
            return None
        source = snapshots.block_of(end)
        sources = [self._source_of(index, source) for index in self.kinds]
        if None in sources:
            return None
        chain.num_forked = len(end.tokens) // TOKEN_BYTES
        self.partial_blocks.tails.move_to_end(source)
        more = tuple(index.match(numbers, each) for index, each in zip(self.kinds, sources, strict=True))
        arrays = np.array(blocks, np.int32), np.array(places, np.int32)
        return PrefixMatch(*arrays, source, chain.num_forked, more, snapshots.place(end))

    def _cut(self, numbers: list[int]) -> int | None:
        """Cuts the entries of a match to those that every kind has. Returns the place of the snapshot behind them."""
        del numbers[num_usable(self.kinds, numbers) :]
        if self.snapshots is None:
            return None
        while (count := self.snapshots.num_usable(numbers)) < len(numbers):
            del numbers[count:]
            del numbers[num_usable(self.kinds, numbers) :]  # a window may have passed the blocks before
        return self.snapshots.place(numbers[-1]) if numbers else None

    def _source_of(self, index: KindIndex, block: int) -> int | None:
        """A kind's block with the tokens of block `block` of kind 0; None if it has none."""
        entry = self._device.entries.get(block)
        return index.tails.get(block) if entry is None else index.blocks.get(entry[3])

    def _fork(self, chain: BlockChain, last: Before) -> tuple[int, int] | None:
        """The block after `last` with the longest match, and its length; None if it is too short."""
        begin = (chain.num_blocks + chain.num_on_host) * self.block_size
        end = min(begin + self.block_size, len(chain.token_ids) - 1)
        if begin >= end:
            return None
        least = min(self.min_tokens_to_fork, end - begin)
        return self.partial_blocks.find(last, chain.contents[TOKEN_BYTES * begin : TOKEN_BYTES * end], least)

    def _run(self, chain: BlockChain, tier: _Tier, place: int, last: Before) -> tuple[list[int], Before]:
        """The consecutive blocks of a tier that match `chain` from block `place` on.

        Also returns the number of the last one.
        """
        most, blocks = (len(chain.token_ids) - 1) // self.block_size, []
        while place < most:
            found = tier.find(self._key(chain, place), last, self._tokens(chain, place))
            if found is None:
                break
            block, last = found
            blocks.append(block)
            place += 1
        return blocks, last

    def note_hits(self, chain: BlockChain) -> None:
        """Counts the lookup of `chain`, whose blocks were used, in the hit statistics."""
        self.num_queries += len(chain.token_ids)
        self.num_hits += (chain.num_blocks + chain.num_on_host) * self.block_size + chain.num_forked
        self.num_host_hits += chain.num_on_host * self.block_size
        self.num_forked += chain.num_forked

    def is_coming(self, chain: BlockChain) -> bool:
        """Whether another sequence is computing enough of the next blocks to wait for them."""
        most = (len(chain.token_ids) - 1) // self.block_size
        begin = chain.num_blocks + chain.num_on_host
        end = begin + -(-self.min_tokens_to_wait_for // self.block_size)
        if not self._computing or end > most:
            return False
        owners = (self._computing.get(self._key(chain, place)) for place in range(begin, end))
        return all(owner is not None and owner != chain.sequence_id for owner in owners)

    # -- adding

    def begin(self, chain: BlockChain, num_tokens: int) -> None:
        """Announces that the first `num_tokens` tokens of `chain` are computed or being computed."""
        num_full = min(num_tokens // self.block_size, chain.num_known)
        first, computing, sequence_id = max(chain.num_computing, chain.num_blocks), self._computing, chain.sequence_id
        if first < num_full:
            self._derive(chain, num_full)
            for key in chain.keys[1 + first : 1 + num_full]:
                computing.setdefault(key, sequence_id)
        chain.num_computing = max(chain.num_computing, num_full)

    def put(self, chain: BlockChain, block: int, tokens: bytes | None = None) -> bool:
        """Adds `block` as the next complete block of `chain`. Returns whether the cache took it.

        `tokens` [B] i32 must be given unless the chain started with them.
        """
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
        if key in self._device.blocks:  # another sequence has computed the same, or digests collide
            known = self._device.find(key, chain.last, tokens)
            chain.is_cut = known is None
            chain.last = chain.last if known is None else known[1]
            return False
        on_host = self._host.find(key, chain.last, tokens) if self._host.blocks else None
        if on_host is None:
            self._num_put += 1
        number = self._num_put if on_host is None else on_host[1]  # keep its number: successors are found by it
        self._device.put(block, (key, chain.last, tokens, number, chain.is_sample))
        self.partial_blocks.add(block, chain.last, tokens)
        chain.last = number
        return True

    def put_tail(self, chain: BlockChain, block: int, tokens: bytes) -> list[int] | None:
        """Adds `block` as the tail of `chain`: it holds `tokens`, less than a block, and keeps them.

        Returns the tails dropped for it; None if the tail is of no use.
        """
        if chain.is_cut or not tokens:
            return None
        gone = self.partial_blocks.add_tail(block, chain.last, tokens)
        for tail in gone or ():
            for index in self.kinds:
                index.drop_tail(tail)
            if self.snapshots is not None:
                self.snapshots.drop_tail(tail)
        return gone

    def drop_tail(self, block: int) -> bool:
        """Removes `block` if it is a tail. Returns whether it was one."""
        for index in self.kinds:
            index.drop_tail(block)
        if self.snapshots is not None:
            self.snapshots.drop_tail(block)
        return self.partial_blocks.drop_tail(block)

    def drop(self, chain: BlockChain) -> None:
        """Withdraws what `begin` announced: the sequence computes nothing more."""
        for place in range(chain.num_blocks, chain.num_computing):
            self._end_computing(chain, self._key(chain, place))
        chain.num_computing = 0

    # -- for routers

    def watch_keys(self) -> KeyChanges:
        """Collects the keys that come and go from now on. Call it while the cache is empty, and once."""
        assert not self._device.blocks and not self._host.blocks, "keys would be missing"
        self._device.changes = self._host.changes = changes = KeyChanges()
        return changes

    def keys_of(self, token_ids: Ints, salt: str = "", *, adapter: str = "") -> list[bytes]:
        """The keys of the full blocks of a prompt."""
        chain = self.chain(0, token_ids, salt, adapter=adapter)
        self._derive(chain, chain.num_known)
        return chain.keys[1:]

    # -- removing

    def forget(self, block: int) -> None:
        """Removes device block `block`, whose contents are lost."""
        if not self.drop_tail(block):
            entry = self._pop(block)
            if self.kinds:
                self._forget_number(entry, self._host)

    def _forget_number(self, entry: _Entry, other: _Tier) -> None:
        """Tells the other kinds that an entry was removed, unless the other tier has it, too."""
        block = other.blocks.get(entry[0])
        if block is None or other.entries[block][3] != entry[3]:
            for index in self.kinds:
                index.forget_number(entry[3])

    def _pop(self, block: int) -> _Entry:
        entry = self._device.pop(block)
        self.partial_blocks.remove(block, entry[1], entry[2])
        return entry

    def is_tail(self, block: int) -> bool:
        """Whether device block `block` is a tail."""
        return block in self.partial_blocks.tails

    def is_on_host(self, block: int) -> bool:
        """Whether the host has a copy of device block `block`."""
        key, before, tokens, _, _ = self._device.entries[block]
        return self._host.find(key, before, tokens) is not None

    def is_sample(self, block: int) -> bool:
        """Whether device block `block` is moved to the host even without credit."""
        return self._device.entries[block][4]

    def move_out(self, block: int, place: int) -> int | None:
        """Moves the entry of device block `block` to host block `place`.

        Returns the host block of the same key that it displaces, if any.
        """
        entry = self._pop(block)
        displaced = self._host.blocks.get(entry[0])
        if displaced is not None:
            gone = self._host.pop(displaced)
            if self.kinds and gone[3] != entry[3]:
                self._forget_number(gone, self._device)
        self._host.put(place, entry)
        return displaced

    def forget_on_host(self, place: int) -> None:
        """Removes host block `place`, if it is known."""
        if place in self._host.entries:
            entry = self._host.pop(place)
            if self.kinds:
                self._forget_number(entry, self._device)

    def clear(self) -> None:
        """Removes all blocks, and all announcements of `begin`."""
        self._device.clear()
        self._host.clear()
        self.partial_blocks.clear()
        self._computing.clear()
        for index in self.kinds:
            index.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def known_blocks(self) -> list[tuple[int, Before, int]]:
        """Each full block on the device, its predecessor (a number, or the salt of a first block) and its number."""
        return [(block, entry[1], entry[3]) for block, entry in self._device.entries.items()]

    def blocks(self) -> set[int]:
        """The device blocks with known contents."""
        return set(self._device.entries) | set(self.partial_blocks.tails)

    def places(self) -> set[int]:
        """The host blocks with known contents."""
        return set(self._host.entries)

    def check(self) -> None:
        """Raises AssertionError unless each entry is indexed by the key of its tokens (I11)."""
        keys = {entry[3]: entry[0] for tier in (self._device, self._host) for entry in tier.entries.values()}
        for tier in (self._device, self._host):
            self._check_tier(tier, keys)
        whole = {block: (entry[1], entry[2]) for block, entry in self._device.entries.items()}
        assert self.partial_blocks.known() == whole | self.partial_blocks.tails, (
            "a block is not indexed by its first tokens"
        )
        assert whole.keys().isdisjoint(self.partial_blocks.tails), "a block is known whole and as a tail"
        assert len(self.partial_blocks.tails) <= self.partial_blocks.most_tails, "there are too many tails"
        for index in self.kinds:
            index.check(set(keys), set(self.partial_blocks.tails))
        if self.snapshots is not None:
            self.snapshots.check()

    def _check_tier(self, tier: _Tier, keys: dict[int, bytes]) -> None:
        assert len(tier.blocks) == len(tier.entries), "a block has no key, or a key has no block"
        for block, (key, before, tokens, _, _) in tier.entries.items():
            assert tier.blocks.get(key) == block, f"the key of block {block} leads to block {tier.blocks.get(key)}"
            root = keys.get(before) if isinstance(before, int) else self._root(before)
            if root is not None:  # else its predecessor was removed, and it cannot be found
                assert self.digest(root, tokens) == key, f"the key of block {block} is not that of its tokens"

    # -- keys

    def _root(self, salt: str | bytes) -> bytes:
        return self.digest(self._secret, salt.encode() if isinstance(salt, str) else salt)

    def _key(self, chain: BlockChain, place: int) -> bytes:
        if len(chain.keys) <= place + 1:
            self._derive(chain, place + 1)
        return chain.keys[place + 1]

    def _derive(self, chain: BlockChain, num_blocks: int) -> None:
        """Makes the keys of the first blocks, as far as they are not known yet."""
        keys, contents, size, digest = chain.keys, chain.contents, self._block_bytes, self.digest
        key = keys[-1]
        for begin in range((len(keys) - 1) * size, num_blocks * size, size):
            key = digest(key, contents[begin : begin + size])
            keys.append(key)

    def _tokens(self, chain: BlockChain, place: int) -> bytes:
        begin = place * self._block_bytes
        return chain.contents[begin : begin + self._block_bytes]

    def _end_computing(self, chain: BlockChain, key: bytes) -> None:
        if self._computing.get(key) == chain.sequence_id:
            del self._computing[key]


def _sha256(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()
