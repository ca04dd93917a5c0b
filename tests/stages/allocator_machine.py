"""Random plans for a real allocator, of the kinds that the real scheduler makes, checked against a naive memory.

    python -m tests.stages.allocator_machine --rules 1000000

`RULES` says what may happen, with which small numbers; hypothesis draws them in test_allocator_machine.py, and the
command above does with a seeded generator. After each the allocator and `naive_memory.py` must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import numpy as np

from millrace.stages.allocator import Allocator
from millrace.stages.host import HostTier
from millrace.stages.messages import Direction, PlanReport, Started, StepDone, StepGrant, StepPlan
from millrace.stages.params import SamplingParams
from millrace.stages.prefix import PrefixCache
from tests.stages.naive_memory import NaiveMemory, Row, Text, Trie

STEPS_IN_FLIGHT = 2
NUM_LETTERS = 3  # of all texts: few, so that they often begin alike
SALTS = ("", "a")
COMMON = [0, 1, 2, 0, 0, 1, 1, 2, 1, 0, 2, 2, 0, 1, 0, 2]  # what many prompts begin with
PARAMS = SamplingParams()

Args = Mapping[str, int]

# name -> arguments, each from 0 to the number given
RULES: Mapping[str, Args] = {
    "start": {"origin": 3, "length": 9, "tail": 8, "salt": 3, "priority": 3, "num_new": 15},
    "plan": {"admitted": 4, "row_limit": 6, "spare_budget": 8, "moves": 2, "is_slow": 3},
    "run": {"count": 5, "finished": 15},
    "complete": {"finished": 15},
    "take_report": {},
    "end": {"which": 7},
    "void": {},
    "reset_prefix_cache": {},
    "crash": {"kind": 8},
}
WEIGHTS = {"start": 5, "plan": 8, "run": 5, "complete": 4, "reset_prefix_cache": 0.3}
SHAPE: Args = {
    "block_size": 2,
    "longest": 2,
    "spare_blocks": 2,
    "num_host_blocks": 3,
    "cache": 3,
    "is_partial": 3,
    "protects_after": 2,
}


@dataclass(eq=False)
class Seq:
    """What the scheduler knows of a sequence, in its own words (see sequences.py)."""

    text: Text
    num_prompt: int
    limit: int
    priority: int
    state: str = "waiting"  # running, returning, over
    slot: int = -1
    num_known: int = 0
    num_computed: int = 0
    num_on_host: int = 0
    swapped_step: int = -1
    last_step: int = -1
    num_preempted: int = 0
    is_finished: bool = False  # the device knows: it says nothing more of it

    @property
    def sequence_id(self) -> int:
        return self.text.sequence_id

    @property
    def rank(self) -> tuple[int, bool, int]:
        return self.priority, not self.num_on_host, self.sequence_id


@dataclass
class _News:
    """What allocate is told with the next plan."""

    ended: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    settled: list[StepDone] = field(default_factory=list)
    voided: list[int] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        return bool(self.ended or self.preempted or self.dropped or self.discarded)


class Walk:
    """An allocator, a scheduler of random choices and a device of lists. Each rule is a method; each checks all."""

    def __init__(
        self,
        block_size: int,
        longest: int,
        spare_blocks: int,
        num_host_blocks: int,
        cache: int,
        is_partial: int,
        protects_after: int,
    ) -> None:
        size = (1, 2, 4)[block_size]
        self.max_model_len = (8, 15, 20)[longest]
        self.num_slots = 4
        self.allows_partial = is_partial > 0
        self.protects_after = 1 + protects_after
        num_host = (0, 2, 6, 40)[num_host_blocks]
        longest_blocks = -(-self.max_model_len // size)
        num_blocks = longest_blocks + spare_blocks * longest_blocks // 4
        self.allocator = Allocator(
            num_blocks,
            size,
            self.num_slots,
            self.max_model_len,
            _make_cache(cache, size),
            HostTier(num_host, size) if num_host else None,
        )
        self.trie = Trie()
        self.memory = NaiveMemory(self.allocator, self.trie)
        self.sequences: dict[int, Seq] = {}  # not over
        self.texts: list[Text] = []  # of all, ever
        self.holders: dict[int, Seq] = {}  # slot -> who is in it
        self.leaving: list[tuple[int, int]] = []  # (last step that may know the slot, slot)
        self.last_granted = self.completed_step = self.told_step = -1
        self.generation = 0
        self.outstanding: tuple[StepPlan, PlanReport] | None = None
        self.news = _News()
        self.must_wait = False
        self.num_stuck = 0  # plans in a row that ran nothing while nothing was in flight
        self.num_quarantined = 0
        self.seen: Counter[str] = Counter()

    # -- rules

    def start(self, origin: int, length: int, tail: int, salt: int, priority: int, num_new: int) -> None:
        """A sequence arrives: its prompt begins like many (0), like an earlier text (1, 2), or like none (3)."""
        if len(self.sequences) >= 10:
            return
        begin = COMMON
        if origin in (1, 2) and self.texts:
            begin = self.texts[-origin if origin <= len(self.texts) else -1].tokens
        elif origin == 3:
            begin = [(tail + place * place) % NUM_LETTERS for place in range(length)]
        prompt = [*begin[:length], *([tail % NUM_LETTERS] if tail < 4 else [])][: self.max_model_len - 1] or [0]
        text = Text(len(self.texts), self.trie, SALTS[salt == 0])
        for token in prompt:
            text.append(token)
        self.texts.append(text)
        limit = min(len(prompt) + 1 + num_new, self.max_model_len)
        self.sequences[text.sequence_id] = Seq(text, len(prompt), limit, max(0, priority - 2))

    def plan(self, admitted: int, row_limit: int, spare_budget: int, moves: int, is_slow: int) -> None:
        """One plan, as the scheduler makes it, with its answer; unless `is_slow` is 0 schedule hears it at once."""
        self.take_report()
        while self.must_wait or self.last_granted - self.completed_step >= STEPS_IN_FLIGHT:
            self.complete(0)
        self._settle()
        self._make_way(moves)
        started = self._admit(admitted)
        plan = self._make_plan(started, max(1, row_limit), spare_budget)
        if plan is None:
            assert not started
            return
        grant, report = self.allocator.serve(plan)
        had_blocks = set(self.memory.tables) - {*plan.ended, *plan.dropped, *plan.preempted}
        self.memory.note(plan, grant, report, {seq.slot: seq.text for seq in started}, self.completed_step)
        self._check_answer(plan, grant, report, had_blocks)
        self.outstanding = plan, report
        if is_slow:
            self.take_report()

    def run(self, count: int, finished: int) -> None:
        """A few plans and their steps, one after another."""
        for _ in range(1 + count):
            self.plan(self.num_slots, self.num_slots, self.max_model_len, 0, 1)
            self.check()
            self.complete(finished)

    def complete(self, finished: int) -> None:
        """The oldest step in flight is done; of its rows those in the bits of `finished` chose to end."""
        self._hear_before_done()
        if not self.memory.flights:
            return
        if self.memory.flights[0].generation != self.generation:
            return self.void()  # it falls with an earlier one
        step = self.memory.run()
        self._pop(step.step)
        rows = [row for row in step.rows if row.is_sampled and not self._seq_of(row).is_finished]
        columns = [self._choose(row, finished >> i & 1 and finished < 4) for i, row in enumerate(rows)]
        known = [column for column in columns if self._knows(column)]
        table = np.array(known, np.int64).reshape(-1, 5)
        done = StepDone(
            step.step,
            table[:, 0].astype(np.intp),
            table[:, 1],
            table[:, 2].astype(np.intp),
            table[:, 3].astype(np.intp),
            table[:, 4] > 0,
        )
        self.news.settled.append(done)
        for _, sequence_id, _, _, is_finished in known:
            if is_finished:
                self._end(sequence_id)

    def void(self) -> None:
        """The oldest step in flight does not happen, nor does what is in flight behind it."""
        self._hear_before_done()
        if not self.memory.flights:
            return
        flights = list(self.memory.flights)
        step = self.memory.fall()
        self._pop(step.step)
        self.news.voided.append(step.step)
        if step.generation != self.generation:
            return
        self.generation += 1
        slots = {row.slot for flight in flights for row in flight.rows}
        if self.outstanding is not None:
            slots |= set(self.outstanding[0].slots.tolist())
        self._take_back([self.holders[slot] for slot in sorted(slots) if slot in self.holders], tell=True)
        self._give_up_swapped(step.step)
        self.seen["void"] += 1

    def take_report(self) -> None:
        """Schedule hears what became of its last plan."""
        if self.outstanding is None:
            return
        (plan, report), self.outstanding = self.outstanding, None
        self.num_quarantined = report.num_quarantined + report.num_host_quarantined
        if report.is_reset:
            self._take_back(list(self.holders.values()), tell=False)
            return self._give_up_swapped(-1)
        if report.is_void:
            self.must_wait = len(plan.slots) > 0 and self.last_granted > self.completed_step
        else:
            self._note_grant(plan, report)
        for slot in report.preempted:
            self._note_preempted(self.holders[slot])
        for slot in (*plan.preempted, *report.preempted):
            self._note_way(self.holders[slot], report, plan)

    def end(self, which: int) -> None:
        """A client goes away, wherever its sequence is."""
        if self.sequences:
            self._end(list(self.sequences)[which % len(self.sequences)])

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed so far is to be found."""
        self.allocator.reset_prefix_cache()
        self.memory.forget_cached()

    def crash(self, kind: int) -> None:
        """Allocate loses its books over a plan (0: before it serves it, 1: after), or schedule does (2)."""
        if kind > 2:
            return
        self.take_report()
        if kind == 2:
            self._take_back(list(self.holders.values()), tell=True)
            return self._give_up_swapped(-1)
        if self.must_wait or self.last_granted - self.completed_step >= STEPS_IN_FLIGHT:
            return
        self._settle()
        plan = self._make_plan(self._admit(self.num_slots), self.num_slots, self.max_model_len)
        if plan is None:
            return
        if kind == 1:
            self.allocator.serve(plan)
        report = self.allocator.reset(plan)
        assert report.is_reset and report.is_void and not report.swapped
        self.memory.forget_all()
        self.outstanding = plan, report
        self.seen["reset"] += 1

    def finish(self) -> None:
        """Everybody goes away, and nothing may be left of anybody (I3, I5)."""
        for sequence_id in list(self.sequences):
            self._end(sequence_id)
        for _ in range(3 * STEPS_IN_FLIGHT + 3):
            self.plan(0, self.num_slots, 0, 0, 1)
            self.complete(0)
        self.check()
        pool, host = self.allocator.pool, self.allocator.host
        assert not self.memory.flights and not self.holders
        assert pool.num_free + pool.num_cached == pool.num_blocks, f"{pool.num_free} blocks are free at the end"
        assert host is None or (not len(host) and host.pool.num_available == host.pool.num_blocks), (
            "host blocks are lost"
        )

    def check(self) -> None:
        """What holds between any two rules."""
        self.allocator.check()
        if self.allocator.cache is not None:
            self.allocator.cache.check()
        self.memory.check(self.completed_step)

    # -- planning

    def _settle(self) -> None:
        leaving, self.leaving = self.leaving, []
        for last_step, slot in leaving:
            if min(last_step, self.last_granted) > self.completed_step:
                self.leaving.append((last_step, slot))
                continue
            seq = self.holders.pop(slot)
            seq.slot = -1
            if seq.state == "returning":
                seq.state = "waiting"

    def _waiting(self) -> list[Seq]:
        return sorted((s for s in self.sequences.values() if s.state == "waiting"), key=lambda seq: seq.rank)

    def _running(self) -> list[Seq]:
        running = [seq for seq in self.holders.values() if seq.state == "running"]
        return sorted(running, key=lambda seq: (seq.priority, seq.sequence_id))

    def _is_protected(self, seq: Seq) -> bool:
        return seq.num_preempted >= self.protects_after

    def _make_way(self, moves: int) -> None:
        """Up to `moves` running sequences lose their slots to strictly better ones that wait."""
        if len(self.holders) < self.num_slots:
            return
        better = [seq.priority for seq in self._waiting()][len(self.leaving) :][:moves]
        for seq in reversed(self._running()):
            if not better or better[0] >= seq.priority:
                return
            if not self._is_protected(seq):
                del better[0]
                self.news.preempted.append(seq.slot)
                self._note_preempted(seq)

    def _admit(self, most: int) -> list[Seq]:
        if any(seq.state == "returning" for seq in self.sequences.values()):
            return []
        free = [slot for slot in range(self.num_slots) if slot not in self.holders]
        admitted = self._waiting()[:most]
        for slot, seq in zip(free, admitted, strict=False):
            seq.state, seq.slot, seq.last_step = "running", slot, -1
            seq.num_known, seq.num_computed = len(seq.text.tokens), 0
            self.holders[slot] = seq
        return admitted[: len(free)]

    def _make_plan(self, started: list[Seq], row_limit: int, spare_budget: int) -> StepPlan | None:
        order = self._running()
        runnable = [seq for seq in order if seq.num_known < seq.limit]
        decodes = [seq for seq in runnable if seq.num_known - seq.num_computed == 1]
        rows = [*decodes, *(seq for seq in runnable if seq not in decodes)][:row_limit]
        is_settling = self.num_quarantined > 0 and self.completed_step > self.told_step
        if not rows and not self.news.is_urgent and not is_settling:
            return None
        is_victim = [place > 0 and not self._is_protected(seq) for place, seq in enumerate(order)]
        behind = {seq.slot: sum(is_victim[place + 1 :]) for place, seq in enumerate(order)}
        reserved = [seq.limit if self._is_protected(seq) else 0 for seq in rows]
        has_reserves = any(self._is_protected(seq) for seq in order)
        news, self.news = self.news, _News()
        self.told_step = self.completed_step
        return StepPlan(
            step=self.last_granted + 1,
            generation=self.generation,
            completed_step=self.completed_step,
            slots=np.array([seq.slot for seq in rows], np.intp),
            num_wanted=np.array([seq.num_known - seq.num_computed for seq in rows], np.int32),
            reaches_end=np.ones(len(rows), np.bool_),
            token_budget=self.num_slots + spare_budget if self.allows_partial else self.max_model_len + spare_budget,
            victims=np.array([s.slot for s, v in zip(order, is_victim, strict=True) if v][::-1], np.intp),
            num_victims=np.array([behind[seq.slot] for seq in rows], np.int32),
            num_reserved=np.array(reserved, np.int32) if has_reserves else None,
            is_decode=0 < len(order) == len(decodes) <= row_limit,
            allows_partial=self.allows_partial,
            started=tuple(_started(seq) for seq in started),
            ended=news.ended,
            preempted=news.preempted,
            dropped=news.dropped,
            discarded=news.discarded,
            settled=news.settled,
            voided=news.voided,
        )

    def _check_answer(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport, had_blocks: set[int]) -> None:
        """No more than was asked for, from nobody but those it may be taken from; and sooner or later something."""
        wanted, granted, cached = plan.num_wanted, report.num_granted, report.num_cached
        assert (granted >= 0).all() and (granted + np.where(granted, cached, 0) <= wanted).all()
        assert granted.sum() <= plan.token_budget, f"{granted.sum()} tokens granted of {plan.token_budget}"
        if not plan.allows_partial:
            is_whole = (granted == 0) | (granted + cached == wanted)
            assert is_whole.all(), f"wishes {wanted.tolist()} are granted in part: {granted.tolist()}"
        rows = np.flatnonzero(granted)
        if grant is not None:
            assert grant.slots.tolist() == plan.slots[rows].tolist()
            assert grant.num_tokens.tolist() == granted[rows].tolist()
            is_sampled = granted[rows] + cached[rows] == wanted[rows]
            assert grant.is_sampled.tolist() == is_sampled.tolist(), "a row is sampled before its end, or not at it"
        assert (grant is None) == report.is_void
        self._check_victims(plan, report, had_blocks)
        is_stuck = grant is None and len(plan.slots) > 0 and self.last_granted == self.completed_step
        self.num_stuck = self.num_stuck + 1 if is_stuck else 0
        assert self.num_stuck <= 2 * self.num_slots, f"{self.num_stuck} plans in a row ran nothing, none in flight"
        self.seen["found"] += int((granted[cached > 0] > 0).sum())
        self.seen["preempted"] += len(report.preempted)
        self.seen["swapped"] += len(report.swapped)
        directions = Counter(copy.direction for copy in (() if grant is None else grant.copies))
        self.seen["copied back"] += directions[Direction.IN]
        self.seen["forked"] += directions[Direction.FORK]
        self.seen["void plan"] += grant is None

    def _check_victims(self, plan: StepPlan, report: PlanReport, had_blocks: set[int]) -> None:
        victims, most = plan.victims.tolist(), int(plan.num_victims.max(initial=0))
        allowed = victims[:most]
        assert len(set(report.preempted)) == len(report.preempted)
        assert set(report.preempted) <= set(allowed), f"{report.preempted} are preempted, allowed are {allowed}"
        for victim in report.preempted:
            first = had_blocks & set(victims[: victims.index(victim)]) - set(report.preempted)
            assert not first, f"slot {victim} is preempted before {first}"
            assert not report.num_granted[plan.slots == victim].any(), f"slot {victim} is preempted, and served"

    # -- hearing

    def _hear_before_done(self) -> None:
        """Schedule hears of a grant before the step can be done."""
        if self.memory.flights and self.memory.flights[0].step > self.last_granted:
            self.take_report()

    def _pop(self, step: int) -> None:
        assert step == self.completed_step + 1
        self.completed_step, self.must_wait = step, False

    def _seq_of(self, row: Row) -> Seq:
        return self.holders[row.slot]

    def _choose(self, row: Row, is_end: int) -> tuple[int, int, int, int, int]:
        """(slot, sequence, place, token, is finished) of what the device makes of a row: it depends on all before."""
        seq = self._seq_of(row)
        assert seq.text is row.text and len(row.text.tokens) == row.end
        place = row.end - seq.num_prompt
        token = sum((place + 1) * (known + 1) for place, known in enumerate(row.text.tokens)) % NUM_LETTERS
        row.text.append(token)
        seq.is_finished = bool(is_end) or len(row.text.tokens) >= seq.limit
        return row.slot, seq.sequence_id, place, token, seq.is_finished

    def _knows(self, column: tuple[int, int, int, int, int]) -> bool:
        holder = self.holders.get(column[0])
        return holder is not None and holder.sequence_id == column[1]

    def _note_grant(self, plan: StepPlan, report: PlanReport) -> None:
        self.last_granted = report.step
        columns = (plan.slots, plan.num_wanted, report.num_granted, report.num_cached)
        for slot, wanted, granted, cached in zip(*(column.tolist() for column in columns), strict=True):
            if not granted:
                continue
            seq = self.holders[slot]
            seq.last_step = report.step
            if cached:
                seq.num_on_host = 0
            if seq.state == "running":
                seq.num_computed += granted + cached
                seq.num_known += granted + cached == wanted

    def _note_preempted(self, seq: Seq) -> None:
        if seq.state == "running":
            seq.num_preempted += 1
            seq.state = "returning"
            self._leave(seq)

    def _note_way(self, seq: Seq, report: PlanReport, plan: StepPlan) -> None:
        num_swapped = report.swapped.get(seq.slot, 0)
        if num_swapped and seq.state == "returning" and plan.generation == self.generation:
            seq.num_on_host, seq.swapped_step = num_swapped, report.step
        elif num_swapped:
            self.news.discarded.append(seq.sequence_id)

    def _end(self, sequence_id: int) -> None:
        seq = self.sequences.pop(sequence_id, None)
        if seq is None:
            return
        self._discard(seq)
        before, seq.state = seq.state, "over"
        if before == "running":
            self._leave(seq)
            self.news.ended.append(seq.slot)

    def _leave(self, seq: Seq) -> None:
        is_asked_for = self.outstanding is not None and seq.slot in self.outstanding[0].slots
        step = self.outstanding[0].step if self.outstanding is not None and is_asked_for else seq.last_step
        self.leaving.append((step, seq.slot))

    def _take_back(self, sequences: list[Seq], *, tell: bool) -> None:
        for seq in sequences:
            if seq.state == "running":
                seq.state = "returning"
                self._leave(seq)
                if tell:
                    self.news.dropped.append(seq.slot)

    def _give_up_swapped(self, void_step: int) -> None:
        for seq in self.sequences.values():
            if seq.swapped_step >= void_step:
                self._discard(seq)

    def _discard(self, seq: Seq) -> None:
        if seq.num_on_host:
            self.news.discarded.append(seq.sequence_id)
            seq.num_on_host = 0


def _started(seq: Seq) -> Started:
    token_ids = np.array(seq.text.tokens, np.int32)
    name = f"r{seq.sequence_id}"
    return Started(seq.slot, seq.sequence_id, name, token_ids, seq.num_prompt, PARAMS, 0, seq.text.salt)


def _make_cache(kind: int, block_size: int) -> PrefixCache | None:
    """None (0), one whose digests often collide (1), or a sound one."""
    if kind == 0:
        return None
    cache = PrefixCache(block_size, digest=_weak_digest if kind == 1 else None)
    cache.min_tokens_to_wait_for = cache.min_tokens_to_fork = 1
    return cache


def _weak_digest(before: bytes, tokens: bytes) -> bytes:
    return bytes([sha256(before + tokens).digest()[0] & 7])


# -- what is known to be wrong


# -- at random


RUNS_BETWEEN_LINES = 1000  # of progress


def walk(seed: int, num_rules: int) -> Counter[str]:
    """One run of `num_rules` rules. Returns how often rare things happened."""
    dice = Random(seed)
    made = Walk(**_draw(dice, SHAPE))
    names, weights = list(RULES), [WEIGHTS.get(name, 1) for name in RULES]
    for name in dice.choices(names, weights, k=num_rules):
        getattr(made, name)(**_draw(dice, RULES[name]))
        made.check()
    made.finish()
    return made.seen


def _draw(dice: Random, args: Args) -> dict[str, int]:
    return {name: dice.randint(0, most) for name, most in args.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive the allocator by random plans against a naive memory.")
    parser.add_argument("--rules", type=int, default=100_000, help="in all")
    parser.add_argument("--rules-per-run", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seed", type=int, help="this run only")
    options = parser.parse_args()
    num_runs = -(-options.rules // options.rules_per_run)
    seeds = range(options.first, options.first + num_runs) if options.seed is None else [options.seed]
    began, seen, failures = time.perf_counter(), Counter[str](), 0
    for seed in seeds:
        try:
            seen += walk(seed, options.rules_per_run)
        except Exception:
            failures += 1
            traceback.print_exc()
            again = f"python -m tests.stages.allocator_machine --seed {seed} --rules-per-run {options.rules_per_run}"
            print(f"seed {seed} failed; again: {again}")
            if failures == 5:
                break
        if (seed + 1 - options.first) % RUNS_BETWEEN_LINES == 0:
            done = (seed + 1 - options.first) * options.rules_per_run
            print(f"{done} rules, {failures} failed, {time.perf_counter() - began:.0f} s", flush=True)
    num_rules = len(seeds) * options.rules_per_run
    print(
        f"{num_rules} rules in {len(seeds)} runs, {failures} failed, {time.perf_counter() - began:.0f} s: {dict(seen)}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
