"""Random plans for an allocator of several kinds, and a device that reads what attention would read.

    python -m tests.stages.allocate.kinds_walk --steps 100000

Each walk draws its kinds, windows, block size, slabs and lengths by its seed. Plans come from `NaiveScheduler`, with
drafts of which some are wrong. The device keeps a table a kind, as grants tell it, and what was written to each place.
It reads the window of each query, and nothing before it. Invariants, checked after each plan and step:

    K1  a slab is lent to one kind or to none, and to none iff all of its blocks are free
    K2  what a query of a step in flight sees lies in blocks that its slot holds, or that are quarantined for the step
    K5  blocks by state add up to the pool, kind by kind
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from millrace.kernels.layout.kv_layout import KindName, KVKind, KVLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.tiers.block_pool import CACHED, FREE, IN_USE, QUARANTINED
from millrace.stages.messages import Drafts, PlanReport, StepDone, StepGrant, StepPlan
from tests.stages.allocate.drafting_scheduler import DraftingScheduler
from tests.stages.allocate.naive_memory import Text, Trie
from tests.stages.schedule.naive_scheduler import STEPS_IN_FLIGHT, Seq

NUM_SLOTS = 4
NUM_LETTERS = 3
POISON = (-1, -1)
Mark = tuple[int, int]  # (sequence, what its text is up to there): of one key

# (name, window as a share of the longest sequence, layers), of each kind
MIXES: tuple[tuple[tuple[KindName, float | None, int], ...], ...] = (
    (("full", None, 1), ("window", 0.3, 5)),
    (("full", None, 2), ("window", 0.6, 2)),
    (("full", None, 1), ("window", 0.1, 3)),
    (("full", None, 1), ("chunk", 0.4, 3)),
    (("full", None, 1), ("window", 0.5, 2), ("window", 0.2, 3)),
    (("window", 0.5, 1), ("window", 0.2, 2)),
    (("window", 0.3, 1),),
)


def draw_layout(dice: Random, block_size: int, longest: int, chunk: int) -> KVLayout:
    """Kinds of a mix in slabs that hold one sequence of `longest` tokens, computed `chunk` at a time, and some more."""
    kinds, first = [], 0
    for name, share, count in dice.choice(MIXES):
        window = None if share is None else max(1, round(share * longest) + dice.randint(-1, 1))
        kinds.append(KVKind(name, tuple(range(first, first + count)), window, 1, 8, 8, 64 * count))
        first += count
    kinds.sort(key=lambda kind: (kind.window is not None, -(kind.window or 0)))
    if len(kinds) == 1:
        probe = KVLayout.uniform(kinds[0], block_size, 1)
        return KVLayout.uniform(kinds[0], block_size, probe.most_blocks(0, longest, chunk) + dice.randint(0, 4))
    count = dice.randint(1, 4)  # blocks of the largest kind in a slab
    slab_bytes = count * max(kind.block_bytes for kind in kinds)
    sizes = tuple(slab_bytes // kind.block_bytes for kind in kinds)
    place = tuple((k, i) for k, kind in enumerate(kinds) for i in range(len(kind.layers)))
    made = KVLayout(tuple(kinds), block_size, slab_bytes, 0, sizes, (), place)
    num_slabs = made.slabs_of_one(longest, chunk) + dice.choice((0, 0, 1, 2, 4, 8))
    return replace(made, num_slabs=num_slabs, num_blocks=tuple(num_slabs * size for size in sizes))


@dataclass
class Row:
    """A row of a step: queries at [start, end), of which the last ones are drafts."""

    slot: int
    text: Text
    start: int
    end: int
    num_drafts: int
    is_sampled: bool


@dataclass
class Step:
    """A granted step that has not run."""

    grant: StepGrant
    rows: list[Row]
    tables: list[dict[int, dict[int, int]]] = field(default_factory=list)  # [K] slot -> place -> block, as it runs


class Walk:
    """An allocator of several kinds, a scheduler of random choices, and a device of dicts."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        self.longest = dice.choice((8, 15, 24, 40))
        self.size = dice.choice((1, 2, 4))
        allows_partial = dice.random() < 0.8
        chunk = 1 if allows_partial else self.longest
        self.layout = draw_layout(dice, self.size, self.longest, chunk)
        self.scheduler = DraftingScheduler(
            dice, NUM_SLOTS, self.longest, allows_partial=allows_partial, protects_after=dice.randint(1, 3)
        )
        self.allocator = Allocator(self.layout.num_blocks[0], self.size, NUM_SLOTS, self.longest, layout=self.layout)
        self.kinds = range(len(self.layout.kinds))
        self.trie = Trie()
        self.num_texts = 0
        self.tables: list[dict[int, dict[int, int]]] = [{} for _ in self.kinds]  # as of the last grant
        self.device: list[dict[tuple[int, int], Mark]] = [{} for _ in self.kinds]  # (block, offset) -> what is there
        self.flights: deque[Step] = deque()
        self.report: PlanReport | None = None
        self.drafts: Drafts | None = None
        self.num_stuck = 0
        self.many_rows = dice.choice((1, 2, 100))  # from which on decoding rows keep the block they have passed
        self.seen: Counter[str] = Counter()

    # -- what may happen

    def arrive(self) -> None:
        if len(self.scheduler.sequences) >= 8:
            return
        text = Text(self.num_texts, self.trie, str(self.num_texts))
        self.num_texts += 1
        num_prompt = self.dice.randint(1, self.longest - 1)
        for _ in range(num_prompt):
            text.append(self.dice.randrange(NUM_LETTERS))
        limit = self.dice.randint(num_prompt + 1, self.longest)
        self.scheduler.add(Seq(text, num_prompt, limit, self.dice.randint(0, 1)))

    def plan(self) -> None:
        dice = self.dice
        self._plan(
            moves=dice.randint(0, 2),
            admitted=dice.randint(0, NUM_SLOTS),
            row_limit=dice.randint(1, NUM_SLOTS),
            spare_budget=dice.choice((0, 1, 3, 7, self.longest)),
        )

    def run(self) -> None:
        """A few plans and their steps, one after another."""
        for _ in range(self.dice.randint(2, 8)):
            self._plan(moves=0, admitted=NUM_SLOTS, row_limit=NUM_SLOTS, spare_budget=self.longest)
            self.complete()

    def _plan(self, **options: int) -> None:
        self.take_report()
        while not self.scheduler.may_plan:
            self.complete()
        plan = self.scheduler.next_plan(**options)
        if plan is None:
            return
        was_steady = self.allocator._steady.made
        self.allocator._windows.many_rows = self.many_rows
        grant, report = self.allocator.serve(plan)
        if was_steady and self.allocator._steady.made == was_steady:
            self.seen["steady"] += 1
            self.seen["written again"] += sum(len(window._reused) for window in was_steady[0].windows)
        self._note(plan, grant, report)
        self.report, self.drafts = report, None if grant is None else grant.drafts
        self.check()
        if self.dice.random() < 0.7:
            self.take_report()

    def take_report(self) -> None:
        if self.report is not None:
            report, self.report = self.report, None
            self.scheduler.hear_of(report, self.drafts)

    def complete(self) -> None:
        """The oldest step in flight runs; some of its sequences end."""
        self._hear_before_done()
        if not self.flights:
            return
        if self.flights[0].grant.generation != self.scheduler.generation:
            return self.void()
        step = self.flights.popleft()
        self._run(step)
        ends = [self._choose(step, row) for row in step.rows if row.is_sampled]
        done = [row for rows in ends for row in rows]
        table = np.array(done, np.int64).reshape(-1, 5)
        slots, ids, places, tokens = (table[:, i] for i in range(4))
        self.scheduler.note_done(
            StepDone(
                step.grant.step,
                slots.astype(np.intp),
                ids,
                places.astype(np.intp),
                tokens.astype(np.intp),
                table[:, 4] > 0,
                most_tokens=max([1, *map(len, ends)]),
            )
        )
        self.check()

    def void(self) -> None:
        """The oldest step in flight breaks off: what it was to write is poison."""
        self._hear_before_done()
        if not self.flights:
            return
        slots = {row.slot for flight in self.flights for row in flight.rows}
        step = self.flights.popleft()
        self._write(step, is_poison=True)
        for row in step.rows:
            self.scheduler.holders[row.slot].has_drafts = False
        grant = step.grant
        self.seen["void"] += self.scheduler.note_void(grant.step, grant.generation, slots)

    def end(self) -> None:
        if self.scheduler.sequences:
            self.scheduler.end(self.dice.choice(sorted(self.scheduler.sequences)))

    def crash(self) -> None:
        """Allocate loses its state, or schedule does."""
        self.take_report()
        if self.dice.random() < 0.5:
            return self.scheduler.rebuild()
        if not self.scheduler.may_plan:
            return
        plan = self.scheduler.next_plan(moves=0, admitted=2, row_limit=NUM_SLOTS, spare_budget=self.longest)
        if plan is None:
            return
        if self.dice.random() < 0.5:
            self.allocator.serve(plan)  # crashes before its grant is sent
        self.report, self.drafts = self.allocator.reset(plan), None
        self.tables = [{} for _ in self.kinds]
        self.seen["reset"] += 1
        self.check()

    def finish(self) -> None:
        """All sequences leave, and every slab is free."""
        for sequence_id in list(self.scheduler.sequences):
            self.scheduler.end(sequence_id)
        for _ in range(3 * STEPS_IN_FLIGHT + 3):
            self.plan()
            self.complete()
        assert not self.flights and not self.scheduler.holders
        assert not any(each.pool.num_in_use or each.pool.num_quarantined for each in self.allocator.kinds)
        slabs = self.allocator._device.slabs
        assert slabs is None or len(slabs.unlent) == slabs.num_slabs, "a slab is lent, and no block is in use"

    # -- the grant

    def _note(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        assert (report.num_granted >= 0).all() and (report.num_granted <= plan.num_wanted).all()
        assert report.num_granted.sum() <= plan.token_budget
        assert report.num_free >= 0 and report.num_quarantined >= 0
        has_quarantined = any(each.pool.num_quarantined for each in self.allocator.kinds)
        assert (report.num_quarantined > 0) == has_quarantined
        for slot in (*plan.ended, *plan.dropped, *plan.preempted, *report.preempted):
            for table in self.tables:
                table.pop(slot, None)
        self.seen["preempted"] += len(report.preempted)
        self.seen["cut"] += bool(len(report.preempted)) or grant is None
        is_stuck = grant is None and len(plan.slots) > 0 and self.scheduler.num_in_flight == 0
        served = {*plan.slots.tolist(), *report.preempted}
        if not is_stuck:
            self.num_stuck = 0
        elif all(slot in served for slot, seq in self.scheduler.holders.items() if seq.state == "running"):
            self.num_stuck += 1  # else a row limit left out a sequence that holds blocks, and could have run
        assert self.num_stuck <= 2 * NUM_SLOTS, f"{self.num_stuck} plans in a row ran nothing, none in flight"
        if grant is None:
            return
        self._note_tables(grant)
        counts = np.zeros(len(grant.slots), np.int32) if grant.drafts is None else grant.drafts.counts
        self.seen["drafted"] += int(counts.sum())
        rows = []
        for i, slot in enumerate(grant.slots.tolist()):
            start, end = int(grant.starts[i]), int(grant.starts[i] + grant.num_tokens[i])
            rows.append(
                Row(slot, self.scheduler.holders[slot].text, start, end, int(counts[i]), bool(grant.is_sampled[i]))
            )
        tables = [{row.slot: dict(table[row.slot]) for row in rows} for table in self.tables]
        self.flights.append(Step(grant, rows, tables))

    def _note_tables(self, grant: StepGrant) -> None:
        for table in self.tables:
            for started in grant.started:
                table[started.slot] = {}
        news = [(0, grant.table_slots, grant.table_places, grant.table_blocks)]
        news += [(each.kind, each.slots, each.places, each.blocks) for each in grant.more_tables]
        for kind, *columns in news:
            in_flight = self._touched(kind)
            for slot, place, block in zip(*(column.tolist() for column in columns), strict=True):
                assert place not in self.tables[kind][slot], f"place {place} of slot {slot} is given twice"
                assert block not in in_flight or self._is_shared(kind, block), (
                    f"a step in flight may still touch block {block} of kind {kind}"
                )
                self.tables[kind][slot][place] = block

    def _is_shared(self, kind: int, block: int) -> bool:
        """Whether a new entry may name a block that steps in flight touch."""
        return False

    def _has_other_holder(self, kind: int, block: int) -> bool:
        """Whether a slot holds the block that got it from the one that filled it."""
        return False

    def _touched(self, kind: int) -> set[int]:
        """Blocks of a kind that steps in flight read or write."""
        return {block for step in self.flights for row in step.rows for block in self._blocks_of(step, row, kind)}

    def _blocks_of(self, step: Step, row: Row, kind: int) -> list[int]:
        first = self._first_key(kind, row.start) // self.size
        table = step.tables[kind][row.slot]
        return [table[place] for place in range(first, -(-row.end // self.size))]

    def _first_key(self, kind: int, position: int) -> int:
        """As attention masks, in words of its own."""
        each = self.layout.kinds[kind]
        if each.window is None:
            return 0
        if each.name == "chunk":
            return position - position % each.window
        return max(0, position - each.window + 1)

    # -- the device

    def _hear_before_done(self) -> None:
        if self.flights and self.flights[0].grant.step > self.scheduler.last_granted:
            self.take_report()

    def _run(self, step: Step) -> None:
        self._write(step, is_poison=False)
        for row in step.rows:
            marks = self._marks(row)
            for kind in self.kinds:
                table = step.tables[kind][row.slot]
                for position in range(row.start, row.end):
                    for key in range(self._first_key(kind, position), position + 1):
                        found = self.device[kind].get((table[key // self.size], key % self.size))
                        assert found == marks[key], (
                            f"step {step.grant.step}: the query at {position} of slot {row.slot} sees {found} at {key} "
                            f"of kind {kind}, and should {marks[key]}"
                        )

    def _write(self, step: Step, *, is_poison: bool) -> None:
        for row in step.rows:
            marks = [] if is_poison else self._marks(row)
            for kind in self.kinds:
                table = step.tables[kind][row.slot]
                for position in range(row.start, row.end):
                    place = table[position // self.size], position % self.size
                    self.device[kind][place] = POISON if is_poison else marks[position]

    def _marks(self, row: Row) -> list[Mark]:
        """What the keys [0, end) of a row are: drafts hold what is guessed, and differ from the text if wrong."""
        known = [(row.text.sequence_id, mark) for mark in row.text.marks]
        certain = row.end - row.num_drafts
        return known[:certain] + [(row.text.sequence_id, -2 - i) for i in range(certain, row.end)]

    def _choose(self, step: Step, row: Row) -> list[tuple[int, int, int, int, int]]:
        """(slot, sequence, place, token, is finished) of each token that a row yields: accepted drafts and one more."""
        seq = self.scheduler.holders[row.slot]
        assert seq.text is row.text
        if seq.is_finished:
            return []
        num_right = self.dice.randint(0, row.num_drafts)
        made = []
        for _ in range(1 + num_right):
            row.text.append(self.dice.randrange(NUM_LETTERS))
        certain = row.end - row.num_drafts
        for position in range(certain, certain + num_right):  # right ones lie where they were guessed
            for kind in self.kinds:
                block = step.tables[kind][row.slot][position // self.size]
                self.device[kind][block, position % self.size] = row.text.sequence_id, row.text.marks[position]
        self.scheduler.accept(seq, num_right)
        seq.is_finished = len(row.text.tokens) >= seq.limit or self.dice.random() < 0.02
        for i in range(1 + num_right):
            place = certain + i - seq.num_prompt
            made.append((row.slot, seq.sequence_id, place, 0, int(seq.is_finished and i == num_right)))
        self.seen["rejected"] += row.num_drafts - num_right
        return made

    # -- invariants

    def check(self) -> None:
        self.allocator.check()
        layout, kinds = self.layout, self.allocator.kinds
        for each in kinds:  # K5
            state = each.pool.state
            counts = [int(np.count_nonzero(state == which)) for which in (FREE, IN_USE, CACHED, QUARANTINED)]
            pool = each.pool
            assert counts == [pool.num_free, pool.num_in_use, pool.num_cached, pool.num_quarantined]
        if len(kinds) > 1:  # K1
            busy = [
                np.isin(each.pool.state, (IN_USE, CACHED, QUARANTINED)).reshape(layout.num_slabs, -1).any(axis=1)
                for each in kinds
            ]
            num_users = np.sum(busy, axis=0)
            assert (num_users <= 1).all(), "a slab has blocks of two kinds"
            free = set((num_users == 0).nonzero()[0].tolist())
            slabs = self.allocator._device.slabs
            assert slabs is not None and set(slabs.unlent) == free, "a slab is lent without use, or used and not lent"
        for step in self.flights:  # K2
            for row in step.rows:
                for kind in self.kinds:
                    pool, tables = kinds[kind].pool, kinds[kind].tables
                    held = set(tables.blocks[row.slot, : int(tables.capacity[row.slot]) // self.size].tolist())
                    for block in self._blocks_of(step, row, kind):
                        is_held = pool.state[block] == IN_USE and (block in held or self._has_other_holder(kind, block))
                        is_waiting = pool.state[block] == QUARANTINED and pool._last_step[block] >= step.grant.step
                        assert is_held or is_waiting, (
                            f"block {block} of kind {kind} is in state {pool.state[block]}, and step {step.grant.step} "
                            f"of slot {row.slot} sees it"
                        )
                        self.seen["seen in quarantine"] += is_waiting


ACTIONS = {"arrive": 4, "plan": 10, "complete": 8, "run": 2, "void": 0.4, "end": 0.5, "crash": 0.2}
ACTIONS_OF_A_WALK = 150


def walk(seed: int, num_actions: int = ACTIONS_OF_A_WALK) -> tuple[int, Counter[str]]:
    """One walk. Returns the number of granted steps, and how often rare things happened."""
    made = Walk(seed)
    for name in made.dice.choices(list(ACTIONS), list(ACTIONS.values()), k=num_actions):
        getattr(made, name)()
    made.finish()
    return made.allocator.last_granted + 1, made.seen


def run_walks(walk: Callable[[int], tuple[int, Counter[str]]], name: str) -> int:
    """The command line of a walk."""
    parser = argparse.ArgumentParser(description="Drive an allocator of several kinds by random plans.")
    parser.add_argument("--steps", type=int, default=100_000, help="granted steps in all")
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--seed", type=int, help="this walk only")
    options = parser.parse_args()
    began, num_steps, seed, seen, failures = time.perf_counter(), 0, options.first, Counter[str](), 0
    while num_steps < options.steps and failures < 3:
        seed = seed if options.seed is None else options.seed
        try:
            steps, found = walk(seed)
            num_steps, seen = num_steps + steps, seen + found
        except Exception:
            failures += 1
            traceback.print_exc()
            print(f"seed {seed} failed; again: python -m tests.stages.allocate.{name} --seed {seed}")
        if options.seed is not None:
            break
        seed += 1
    seconds = time.perf_counter() - began
    print(f"{num_steps} steps, seeds {options.first} to {seed - 1}, {failures} failed, {seconds:.0f} s: {dict(seen)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run_walks(walk, "kinds_walk"))
