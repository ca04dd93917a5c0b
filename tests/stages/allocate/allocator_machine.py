"""Random plans of a naive scheduler for a real allocator, checked against a naive memory.

    python -m tests.stages.allocate.allocator_machine --rules 1000000

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
from hashlib import sha256
from random import Random

import numpy as np

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import Direction, PlanReport, StepDone, StepGrant, StepPlan
from tests.stages.allocate.naive_memory import NaiveMemory, Row, Text, Trie
from tests.stages.schedule.naive_scheduler import STEPS_IN_FLIGHT, NaiveScheduler, Seq

NUM_SLOTS = 4
NUM_LETTERS = 3  # of all texts: few, so that they often begin alike
SALTS = ("", "a")
COMMON = [0, 1, 2, 0, 0, 1, 1, 2, 1, 0, 2, 2, 0, 1, 0, 2]  # what many prompts begin with

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


class Walk:
    """An allocator, a scheduler of random choices and a device of lists. Each rule is a method."""

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
        self.scheduler = NaiveScheduler(
            NUM_SLOTS, self.max_model_len, allows_partial=is_partial > 0, protects_after=1 + protects_after
        )
        num_host = (0, 2, 6, 40)[num_host_blocks]
        longest_blocks = -(-self.max_model_len // size)
        num_blocks = longest_blocks + spare_blocks * longest_blocks // 4
        self.allocator = Allocator(
            num_blocks,
            size,
            NUM_SLOTS,
            self.max_model_len,
            _make_cache(cache, size),
            HostTier(num_host, size) if num_host else None,
        )
        self.trie = Trie()
        self.memory = NaiveMemory(self.allocator, self.trie)
        self.texts: list[Text] = []  # of all, ever
        self.report: PlanReport | None = None  # not yet delivered to schedule
        self.num_stuck = 0  # plans in a row that ran nothing while nothing was in flight
        self.seen: Counter[str] = Counter()

    # -- rules

    def start(self, origin: int, length: int, tail: int, salt: int, priority: int, num_new: int) -> None:
        """A sequence arrives: its prompt begins like many (0), like an earlier text (1, 2), or like none (3)."""
        if len(self.scheduler.sequences) >= 10:
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
        self.scheduler.add(Seq(text, len(prompt), limit, max(0, priority - 2)))

    def plan(self, admitted: int, row_limit: int, spare_budget: int, moves: int, is_slow: int) -> None:
        """One plan, as the scheduler makes it; unless `is_slow` is 0, schedule takes its report at once."""
        self.take_report()
        while not self.scheduler.may_plan:
            self.complete(0)
        plan = self.scheduler.plan(
            moves=moves, admitted=admitted, row_limit=max(1, row_limit), spare_budget=spare_budget
        )
        if plan is None:
            return
        for array in (plan.slots, plan.num_wanted, plan.reaches_end, plan.victims, plan.num_victims):
            array.flags.writeable = False  # a plan is never patched on the way
        grant, report = self.allocator.serve(plan)
        had_blocks = set(self.memory.tables) - {*plan.ended, *plan.dropped, *plan.preempted}
        texts = {started.slot: self.scheduler.holders[started.slot].text for started in plan.started}
        self.memory.note(plan, grant, report, texts, self.scheduler.completed_step)
        self._check_answer(plan, grant, report, had_blocks)
        self.report = report
        if is_slow:
            self.take_report()

    def run(self, count: int, finished: int) -> None:
        """A few plans and their steps, one after another."""
        for _ in range(1 + count):
            self.plan(NUM_SLOTS, NUM_SLOTS, self.max_model_len, 0, 1)
            self.check()
            self.complete(finished)

    def complete(self, finished: int) -> None:
        """The oldest step in flight is done; of its rows those in the bits of `finished` chose to end."""
        self._hear_before_done()
        if not self.memory.flights:
            return
        if self.memory.flights[0].generation != self.scheduler.generation:
            return self.void()  # voided because of an earlier one
        step = self.memory.run()
        rows = [row for row in step.rows if row.is_sampled and not self._seq_of(row).is_finished]
        chosen = [self._choose(row, finished >> i & 1 and finished < 4) for i, row in enumerate(rows)]
        table = np.array(chosen, np.int64).reshape(-1, 5)
        done = StepDone(
            step.step,
            table[:, 0].astype(np.intp),
            table[:, 1],
            table[:, 2].astype(np.intp),
            table[:, 3].astype(np.intp),
            table[:, 4] > 0,
        )
        self.scheduler.note_done(done)

    def void(self) -> None:
        """The oldest step in flight is voided, and with it all later ones."""
        self._hear_before_done()
        if not self.memory.flights:
            return
        slots = {row.slot for flight in self.memory.flights for row in flight.rows}
        step = self.memory.fall()
        self.seen["void"] += self.scheduler.note_void(step.step, step.generation, slots)

    def take_report(self) -> None:
        """Schedule takes the report on its last plan."""
        if self.report is not None:
            report, self.report = self.report, None
            self.scheduler.hear(report)

    def end(self, which: int) -> None:
        """A client goes away, wherever its sequence is."""
        sequences = self.scheduler.sequences
        if sequences:
            self.scheduler.end(list(sequences)[which % len(sequences)])

    def reset_prefix_cache(self) -> None:
        """The prefix cache is reset."""
        self.allocator.reset_prefix_cache()
        self.memory.forget_cached()

    def crash(self, kind: int) -> None:
        """Allocate loses its state at a plan (0: before serving it, 1: after), or schedule does (2)."""
        if kind > 2:
            return
        self.take_report()
        if kind == 2:
            return self.scheduler.rebuild()
        if not self.scheduler.may_plan:
            return
        plan = self.scheduler.plan(moves=0, admitted=NUM_SLOTS, row_limit=NUM_SLOTS, spare_budget=self.max_model_len)
        if plan is None:
            return
        if kind == 1:
            self.allocator.serve(plan)
        report = self.allocator.reset(plan)
        assert report.is_reset and report.is_void and not report.swapped
        self.memory.forget_all()
        self.report = report
        self.seen["reset"] += 1

    def finish(self) -> None:
        """All clients leave, and nothing of any sequence may remain (I3, I5)."""
        for sequence_id in list(self.scheduler.sequences):
            self.scheduler.end(sequence_id)
        for _ in range(3 * STEPS_IN_FLIGHT + 3):
            self.plan(0, NUM_SLOTS, 0, 0, 1)
            self.complete(0)
        self.check()
        pool, host = self.allocator.pool, self.allocator.host
        assert not self.memory.flights and not self.scheduler.holders
        assert pool.num_free + pool.num_cached == pool.num_blocks, f"{pool.num_free} blocks are free at the end"
        assert host is None or (not len(host) and host.pool.num_available == host.pool.num_blocks), (
            "host blocks are lost"
        )

    def check(self) -> None:
        """Checks what holds between any two rules."""
        self.allocator.check()
        if self.allocator.cache is not None:
            self.allocator.cache.check()
        self.memory.check(self.scheduler.completed_step)

    # -- the grant and report

    def _check_answer(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport, had_blocks: set[int]) -> None:
        """Grants at most the demand, preempts only allowed victims, and makes progress sooner or later."""
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
        is_stuck = grant is None and len(plan.slots) > 0 and self.scheduler.num_in_flight == 0
        self.num_stuck = self.num_stuck + 1 if is_stuck else 0
        assert self.num_stuck <= 2 * NUM_SLOTS, f"{self.num_stuck} plans in a row ran nothing, none in flight"
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

    # -- the device

    def _hear_before_done(self) -> None:
        """Schedule takes the report before the step can be done."""
        if self.memory.flights and self.memory.flights[0].step > self.scheduler.last_granted:
            self.take_report()

    def _seq_of(self, row: Row) -> Seq:
        return self.scheduler.holders[row.slot]

    def _choose(self, row: Row, is_end: int) -> tuple[int, int, int, int, int]:
        """(slot, sequence, place, token, is finished) of what the device makes of a row: it depends on all before."""
        seq = self._seq_of(row)
        assert seq.text is row.text and len(row.text.tokens) == row.end
        place = row.end - seq.num_prompt
        token = sum((place + 1) * (known + 1) for place, known in enumerate(row.text.tokens)) % NUM_LETTERS
        row.text.append(token)
        seq.is_finished = bool(is_end) or len(row.text.tokens) >= seq.limit
        return row.slot, seq.sequence_id, place, token, seq.is_finished


def _make_cache(kind: int, block_size: int) -> PrefixCache | None:
    """None (0), one whose digests often collide (1), or a sound one."""
    if kind == 0:
        return None
    cache = PrefixCache(block_size, digest=_weak_digest if kind == 1 else None)
    cache.min_tokens_to_wait_for = cache.min_tokens_to_fork = 1
    return cache


def _weak_digest(before: bytes, tokens: bytes) -> bytes:
    return bytes([sha256(before + tokens).digest()[0] & 7])


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
            module = "tests.stages.allocate.allocator_machine"
            again = f"python -m {module} --seed {seed} --rules-per-run {options.rules_per_run}"
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
