"""The contents of device and host blocks, derived from grants alone: lists, sets and dicts, no cleverness.

The oracle of `allocator_machine.py`. It does not depend on how blocks are chosen: it reads the allocator's state only
to compare it.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.tiers.block_pool import BlockPool, BlockState
from millrace.stages.messages import Direction, PlanReport, StepGrant, StepPlan

NEVER = sys.maxsize  # the step that copies what is lost
SAFE = {int(BlockState.IN_USE), int(BlockState.QUARANTINED)}  # states in which no other sequence gets a block
EMPTY, POISON = -1, -2  # never written; being written, or left so by a step that broke off


class Trie:
    """A number for each beginning of a text and the salt before it. Keys and values depend on all tokens up to their
    own, so this is what a place of the cache holds: equal numbers are equal contents, and no others are."""

    def __init__(self) -> None:
        self.token_of: list[int] = []
        self._numbers: dict[tuple[int, int | str], int] = {}

    def root(self, salt: str) -> int:
        """The empty text."""
        return self._number(-1, salt, -1)

    def after(self, number: int, token: int) -> int:
        """The text `number` and one token more."""
        return self._number(number, token, token)

    def _number(self, before: int, what: int | str, token: int) -> int:
        if (before, what) not in self._numbers:
            self._numbers[before, what] = len(self.token_of)
            self.token_of.append(token)
        return self._numbers[before, what]


@dataclass(eq=False)
class Text:
    """The tokens that one sequence has, and what the cache should hold for each."""

    sequence_id: int
    trie: Trie
    salt: str
    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.marks.append(self.trie.after(self.marks[-1] if self.marks else self.trie.root(self.salt), token))


@dataclass(frozen=True)
class Row:
    """Tokens [start, end) of a sequence, computed in a step, in `blocks`, the first ones of its table."""

    slot: int
    text: Text
    start: int
    end: int
    is_sampled: bool
    blocks: list[int]


@dataclass(frozen=True)
class Step:
    """A granted step, until it is done or void."""

    step: int
    generation: int
    rows: list[Row]
    copies: list[tuple[Direction, list[int], list[int]]]
    used: set[int]  # blocks on the device that it may read or write
    used_on_host: set[int]
    moved: dict[int, list[int]]  # cached blocks that it copies out before it gives them away -> what they hold


class NaiveMemory:
    """Every block is a list, every table a dict; raises AssertionError for a grant that could do harm."""

    def __init__(self, allocator: Allocator, trie: Trie) -> None:
        self.allocator = allocator
        self.trie = trie
        self.size = allocator.pool.block_size
        num_host = 0 if allocator.host is None else allocator.host.pool.num_blocks
        self.device = [[EMPTY] * self.size for _ in range(allocator.pool.num_blocks)]
        self.host = [[EMPTY] * self.size for _ in range(num_host)]
        self.tenants: dict[int, Text] = {}  # slot -> the sequence that started there last
        self.tables: dict[int, dict[int, int]] = {}  # slot -> place -> block
        self.num_computed: dict[int, int] = {}  # slot -> tokens, when all steps in flight are done
        self.num_done: dict[int, int] = {}  # slot -> tokens that certainly lie in its blocks now
        self.on_host: dict[int, tuple[Text, int, list[int], int]] = {}  # sequence -> its tokens there, blocks, step
        self.moved: dict[int, int] = {}  # host block -> the step that copies a cached block there
        self.flights: deque[Step] = deque()
        self.stale_slots: set[int] = set()  # that ran when the prefix cache was reset
        self.stale: set[int] = set()  # blocks that were filled before that, or on top of such: not to be found

    # -- plans

    def note(
        self, plan: StepPlan, grant: StepGrant | None, report: PlanReport, started: dict[int, Text], completed: int
    ) -> None:
        """A plan was served; `started` are the texts of the sequences in `plan.started`, by slot."""
        for slot in (*plan.ended, *plan.dropped):
            self._empty(slot)
        for sequence_id in plan.discarded:
            self.on_host.pop(sequence_id, None)
        lost = {slot: (self.tenants.get(slot), self._empty(slot)) for slot in plan.preempted}
        self.tenants |= started
        lost |= {slot: (self.tenants.get(slot), self._empty(slot)) for slot in report.preempted}
        if grant is None:
            assert report.is_void and not report.swapped, "a void plan is said to have copied blocks"
            return
        assert grant.step == plan.step and grant.generation == plan.generation
        copies = [(copy.direction, copy.sources.tolist(), copy.destinations.tolist()) for copy in grant.copies]
        used, used_on_host, gone = self._note_copied_out(grant.step, report, lost, copies)
        moved = {block: list(self.device[block]) for block in gone}
        new = self._note_tables(grant)
        assert gone <= set(new), f"blocks {sorted(gone)} are copied out, and not all of them are needed"
        self._take(new, self.device, used, [flight.used for flight in self.flights])
        self._note_begun(grant, copies, new, used, used_on_host)
        self._note_forked(copies, new, used)
        rows = [self._row(*row) for row in zip(*_columns(grant), strict=True)]
        assert len({row.slot for row in rows}) == len(rows), "two rows of one step have one slot"
        used |= {block for row in rows for block in row.blocks}
        self.flights.append(Step(grant.step, grant.generation, rows, copies, used, used_on_host, moved))

    def forget_all(self) -> None:
        """The allocator has lost its state."""
        for slot in list(self.tables):
            self._empty(slot)
        self.on_host.clear()

    def forget_cached(self) -> None:
        """The prefix cache was reset: nothing that lies anywhere now is to be found."""
        self.stale_slots = set(self.tables)
        self.stale = {block for table in self.tables.values() for block in table.values()}

    def _empty(self, slot: int) -> list[int]:
        self.num_done.pop(slot, None)
        table = self.tables.pop(slot, {})
        return [table[place] for place in sorted(table)]

    def _note_copied_out(
        self,
        step: int,
        report: PlanReport,
        lost: dict[int, tuple[Text | None, list[int]]],
        copies: list[tuple[Direction, list[int], list[int]]],
    ) -> tuple[set[int], set[int], set[int]]:
        """Applies the copies to the host. Returns the blocks read for swapped sequences, the host blocks written, and
        the cached blocks moved."""
        outs = [(sources, destinations) for direction, sources, destinations in copies if direction is Direction.OUT]
        gone = [slot for slot in lost if slot in report.swapped]
        assert len(gone) == len(report.swapped) and 0 <= len(outs) - len(gone) <= 1, (
            f"{outs} for {dict(report.swapped)}"
        )
        written = [block for _, destinations in outs for block in destinations]
        self._take(written, self.host, set(), [flight.used_on_host for flight in self.flights])
        for slot, (sources, destinations) in zip(gone, outs, strict=False):
            text, table = lost[slot]
            assert text is not None and report.swapped[slot] == self.num_computed[slot], "other tokens than it had"
            assert len(sources) == len(destinations)
            assert sources == table[: len(sources)], f"slot {slot} had blocks {table}, and {sources} are copied"
            assert not set(destinations) & {b for _, _, held, _ in self.on_host.values() for b in held}
            self.on_host[text.sequence_id] = text, report.swapped[slot], destinations, step
        for block in written:
            self.moved.pop(block, None)
        moves = outs[len(gone) :]
        self.moved |= {block: step for _, destinations in moves for block in destinations}
        read = {block for sources, _ in outs[: len(gone)] for block in sources}
        return read, set(written), {block for sources, _ in moves for block in sources}

    def _note_tables(self, grant: StepGrant) -> list[int]:
        """Applies the new table entries. Returns the blocks without known contents."""
        num_found = {started.slot: started.num_shared // self.size for started in grant.started}
        for started in grant.started:
            text = self.tenants[started.slot]
            assert started.sequence_id == text.sequence_id and started.num_cached < len(started.token_ids)
            self.tables[started.slot], self.num_done[started.slot] = {}, 0
            self.num_computed[started.slot] = started.num_cached
            self.stale_slots.discard(started.slot)
        new = []
        entries = (grant.table_slots.tolist(), grant.table_places.tolist(), grant.table_blocks.tolist())
        for slot, place, block in zip(*entries, strict=True):
            assert place not in self.tables[slot], f"place {place} of slot {slot} is given twice"
            self.tables[slot][place] = block
            if place < num_found.get(slot, 0):
                assert block not in self.stale, f"block {block} was filled before the cache was reset, and is found"
                continue
            new.append(block)
            (self.stale.add if slot in self.stale_slots else self.stale.discard)(block)
        return new

    def _note_begun(
        self,
        grant: StepGrant,
        copies: list[tuple[Direction, list[int], list[int]]],
        new: list[int],
        used: set[int],
        used_on_host: set[int],
    ) -> None:
        """Applies the copies from the host."""
        written = set(used_on_host)
        for direction, sources, destinations in copies:
            if direction is Direction.IN:
                assert set(destinations) <= set(new), f"blocks {destinations} are copied into, not all of them are new"
                assert not written & set(sources), "host blocks are written and read in one step"
                used |= set(destinations)
                used_on_host |= set(sources)
        for started in grant.started:
            self.on_host.pop(started.sequence_id, None)

    def _note_forked(
        self, copies: list[tuple[Direction, list[int], list[int]]], new: list[int], used: set[int]
    ) -> None:
        """Applies the copies of partly matching blocks, which come after all copies to the host, so that no last copy
        is lost."""
        for place, (direction, sources, destinations) in enumerate(copies):
            if direction is Direction.FORK:
                assert set(destinations) <= set(new), f"blocks {destinations} are copied into, not all of them are new"
                assert not set(sources) & set(new), f"blocks {sources} are copied from, and given away at once"
                assert not set(sources) & self.stale, f"blocks {sources} were filled before the cache was reset"
                assert all(later is not Direction.OUT for later, _, _ in copies[place:]), "copied over what moves out"
                used |= {*sources, *destinations}

    def _take(self, new: list[int], blocks: list[list[int]], used: set[int], in_flight: list[set[int]]) -> None:
        """Checks that no table or step in flight has the `new` blocks. Their contents become undefined."""
        assert len(set(new)) == len(new), f"blocks {new} are given, one of them twice"
        assert not used & set(new), f"blocks {sorted(used & set(new))} are read and given away in one step"
        for touched in in_flight:
            assert not touched & set(new), f"a step in flight may still touch blocks {sorted(touched & set(new))}"
        for block in new:
            blocks[block] = [POISON] * self.size

    def _row(self, slot: int, start: int, count: int, is_sampled: bool) -> Row:
        assert count >= 1 and start == self.num_computed[slot], f"slot {slot} goes on at {start}"
        end, table = start + count, self.tables[slot]
        num_blocks = -(-end // self.size)
        assert set(range(num_blocks)) <= table.keys(), f"slot {slot} has {len(table)} blocks for {end} tokens"
        blocks = [table[place] for place in range(num_blocks)]
        for block in blocks[start // self.size :]:
            num_holders = sum(block in held.values() for held in self.tables.values())
            assert num_holders == 1, f"slot {slot} writes to block {block}, which {num_holders} tables hold"
        self.num_computed[slot] = end
        return Row(slot, self.tenants[slot], start, end, is_sampled, blocks)

    # -- steps

    def run(self) -> Step:
        """The oldest step in flight happens. Every row finds its whole history."""
        step = self.flights.popleft()
        for direction, sources, destinations in step.copies:
            source, destination = self._sides(direction)
            for a, b in zip(sources, destinations, strict=True):
                is_moved = direction is Direction.OUT and a in step.moved
                destination[b] = list(step.moved[a] if is_moved else source[a])
        for row in step.rows:
            self._write(row, row.text.marks[row.start : row.end])
        for row in step.rows:
            found = self._read(self.device, row.blocks, row.end)
            expected = row.text.marks[: row.end]
            assert found == expected, f"step {step.step}: slot {row.slot} reads {found}, its history is {expected}"
            if self.tenants[row.slot] is row.text and row.slot in self.num_done:
                self.num_done[row.slot] = row.end
        return step

    def fall(self) -> Step:
        """The oldest step in flight breaks off somewhere: where it would have written, anything may be."""
        step = self.flights.popleft()
        for direction, _, destinations in step.copies:
            for block in destinations:
                self._sides(direction)[1][block] = [POISON] * self.size
        for row in step.rows:
            self._write(row, [POISON] * (row.end - row.start))
        self.moved |= {block: NEVER for block, moved_in in self.moved.items() if moved_in == step.step}
        for sequence_id, (text, count, held, copied_in) in self.on_host.items():
            if copied_in == step.step:
                self.on_host[sequence_id] = text, count, held, NEVER
        return step

    def _sides(self, direction: Direction) -> tuple[list[list[int]], list[list[int]]]:
        source = self.host if direction is Direction.IN else self.device
        return source, self.host if direction is Direction.OUT else self.device

    def _write(self, row: Row, marks: list[int]) -> None:
        assert len(marks) == row.end - row.start, f"slot {row.slot} computes tokens that it does not have yet"
        for position, mark in enumerate(marks, row.start):
            self.device[row.blocks[position // self.size]][position % self.size] = mark

    def _read(self, blocks: list[list[int]], ids: list[int], count: int) -> list[int]:
        return [mark for block in ids for mark in blocks[block]][:count]

    # -- after every rule

    def check(self, completed_step: int) -> None:
        """Checks the allocator's view against this one: holders, states, contents (I3, I4, I5, I11)."""
        self._check_pool(self.allocator.pool, Counter(b for t in self.tables.values() for b in t.values()), "used")
        for slot, count in self.num_done.items():
            text, table = self.tenants[slot], self.tables[slot]
            found = self._read(self.device, [table[place] for place in range(-(-count // self.size))], count)
            assert found == text.marks[:count], f"what slot {slot} has computed is gone: {found}"
        host = self.allocator.host
        if host is not None:
            self._check_pool(host.pool, Counter(b for _, _, held, _ in self.on_host.values() for b in held), "host")
            assert len(host) == len(self.on_host)
            for sequence_id, (text, count, held, step) in self.on_host.items():
                assert (host.num_tokens(sequence_id), host.blocks(sequence_id).tolist()) == (count, held)
                if step <= completed_step:
                    found = self._read(self.host, held, count)
                    assert found == text.marks[:count], f"sequence {sequence_id} has {found} on the host"
        self._check_cache(completed_step)

    def _check_pool(self, pool: BlockPool, holders: Counter[int], what: str) -> None:
        counts = [holders[block] for block in range(pool.num_blocks)]
        assert pool.num_tables.tolist() == counts, f"{what}: held {counts} times, counted {pool.num_tables.tolist()}"
        for step in self.flights:
            for block in step.used if what == "used" else step.used_on_host:
                state = int(pool.state[block])
                assert state in SAFE, (
                    f"{what}: step {step.step} may touch block {block}, which is {BlockState(state)!r}"
                )

    def _check_cache(self, completed_step: int) -> None:
        cache = self.allocator.cache
        if cache is None:
            return
        for block, (_, _, tokens, *_) in cache._device.entries.items():
            self._check_found(self.device[block], tokens, f"block {block}")
        for block, (_, tokens) in cache.partial_blocks.tails.items():
            self._check_found(self.device[block][: len(tokens) // 4], tokens, f"the tail in block {block}")
        for block, (_, _, tokens, *_) in cache._host.entries.items():
            if self.moved[block] <= completed_step:
                self._check_found(self.host[block], tokens, f"block {block} on the host")

    def _check_found(self, marks: list[int], tokens: bytes, what: str) -> None:
        assert min(marks) >= 0, f"{what} can be found, and nobody has filled it"
        found = [self.trie.token_of[mark] for mark in marks]
        assert found == np.frombuffer(tokens, np.int32).tolist(), f"{what} is said to hold other tokens"


def _columns(grant: StepGrant) -> tuple[list[int], list[int], list[int], list[bool]]:
    return grant.slots.tolist(), grant.starts.tolist(), grant.num_tokens.tolist(), grant.is_sampled.tolist()
