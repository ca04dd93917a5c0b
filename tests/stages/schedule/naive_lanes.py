"""Lanes by loops and sets, which remember nothing: the oracle of `Lanes`, and random lives of both, plan by plan.

python -m tests.stages.schedule.naive_lanes --plans 100000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection
from typing import Any

import numpy as np

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.messages import Guess, PlanReport, StepDone, StepGrant, StepPlan, StepVoid
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.testing.scripted.grant_checker import GrantChecker
from tests.stages.schedule.plans import request


class NaiveLanes:
    """In place of a planner's `Lanes`: no lane is ever remembered."""

    is_busy = False

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes

    def free_lane(self, service_order: Any, flights: Any) -> None:
        return None

    def are_filled_by(self, slots: Any, service_order: Any, flights: Any) -> bool:
        return False

    def drop(self, steady: Any) -> None:
        return None

    def clear(self) -> None:
        return None

    def rows(
        self,
        service_order: Any,
        num_left: np.ndarray,
        is_decode: np.ndarray,
        is_prefill: np.ndarray,
        flights: Collection[Any],
        row_limit: int,
        *,
        is_drafting: bool,
    ) -> tuple[None, np.ndarray, np.ndarray]:
        awaited = {slot for flight in flights for slot in flight.awaited.tolist()}
        busy = len([flight for flight in flights if flight.has_decodes])
        total = [left for left in num_left.tolist() if left == 1]
        most = 0 if busy >= self.num_lanes else -(-len(total) // self.num_lanes)
        decodes, prompts = [], []
        for slot, left, decodes_now, computes in zip(
            service_order.slots.tolist(), num_left.tolist(), is_decode.tolist(), is_prefill.tolist(), strict=True
        ):
            if slot in awaited:
                continue
            if decodes_now and len(decodes) < most:
                decodes.append((slot, left))
            elif computes:
                prompts.append((slot, left))
        rows = (decodes + prompts)[:row_limit]
        return None, np.array([slot for slot, _ in rows], np.intp), np.array([left for _, left in rows], np.int32)


class LanesWalk:
    """A random life of requests: a scheduler with lanes, beside one without memory that is told the same."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        block_size, self.max_model_len = draw.choice([2, 4, 16]), draw.choice([16, 48])
        num_seqs, self.num_lanes = draw.randint(1, 9), draw.randint(2, 4)
        is_chunked = draw.random() < 0.8
        blocks_per_slot = -(-self.max_model_len // block_size)
        self.num_blocks = blocks_per_slot + draw.randint(0, 6 * blocks_per_slot)
        self.limits = StepLimits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs, draw.choice([num_seqs, 13, 64]) if is_chunked else self.max_model_len),
            max_model_len=self.max_model_len,
            block_size=block_size,
            steps_in_flight=self.num_lanes + 1,
            enable_chunked_prefill=is_chunked,
            num_speculative_tokens=draw.choice([0, 0, 7]),
            num_lanes=self.num_lanes,
        )
        self.lanes, self.naive = Scheduler(self.limits), Scheduler(self.limits)
        self.naive._planner._lanes = NaiveLanes(self.num_lanes)  # type: ignore[assignment]
        sizes = (self.num_blocks, block_size, num_seqs, self.max_model_len)
        self.allocator = Allocator(*sizes, num_lanes=self.num_lanes)
        self.violations: list[str] = []
        sizes_of_checks = (self.num_blocks, 0, block_size, num_seqs, blocks_per_slot)
        self.checker = GrantChecker(*sizes_of_checks, self.violations, self.num_lanes)
        self.flights: list[StepGrant] = []
        self.num_plans = self.num_lane_plans = self.num_steady = 0
        self.most_in_flight = 0
        self.num_known: dict[int, int] = {}  # sequence id -> tokens, as the device knows them
        self.num_prompt: dict[int, int] = {}
        self.sequence_in: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}
        self.wanted: dict[int, int] = {}
        self.gone: set[int] = set()
        self.voided = -1
        self.to_come = draw.randint(1, 30)

    def run(self) -> None:
        """Until all requests have ended."""
        for _ in range(20_000):
            self._arrive()
            if self._plan():
                continue
            if self.flights and self.draw.random() < 0.7:
                self._finish(self.flights.pop(0))
            elif len(self.wanted) == self.to_come and not self.lanes.sequences and not self.flights:
                break
        else:
            raise AssertionError("it never ends")
        while self._plan():  # what is left to report
            if self.flights:
                self._finish(self.flights.pop(0))
        assert self.allocator.pool.num_free == self.num_blocks
        for number in set(self.wanted) - self.gone:
            assert self.answers[number] == list(range(self.wanted[number])), number

    def _both(self, call: str, *args: Any) -> Any:
        found = [getattr(each, call)(*args) for each in (self.lanes, self.naive)]
        return found[0]

    def _arrive(self) -> None:
        draw = self.draw
        if len(self.wanted) < self.to_come and draw.random() < 0.3:
            num_prompt = draw.randint(1, self.max_model_len - 1)
            number = len(self.wanted)
            self.wanted[number] = max_tokens = draw.randint(1, self.max_model_len - num_prompt)
            priority = draw.choice([0, 0, 0, 1, -1])
            self._both("add", request(number, num_prompt, max_tokens=max_tokens, priority=priority))
        if self.wanted and draw.random() < 0.02:
            number = draw.choice(list(self.wanted))
            kind = draw.choice(["end", "park", "unpark"])
            if kind == "end":
                self.gone.add(number)
            self._both(kind, number)
            if kind == "park":
                self.parked = number
        if hasattr(self, "parked") and draw.random() < 0.1:
            self._both("unpark", self.parked)
            del self.parked
        for slot in self.lanes.slots_to_guess():
            sequence_id, num_known = int(self.lanes.slots.sequence_id[slot]), int(self.lanes.slots.num_known[slot])
            token_ids = np.zeros(draw.choice([0, 3, 7]), np.intp)
            self._both("take_guess", Guess(slot, sequence_id, num_known, token_ids, draw.random() < 0.5))

    def _plan(self) -> bool:
        plan, naive = self.lanes.plan(), self.naive.plan()
        assert (plan is None) == (naive is None)
        if plan is None or naive is None:
            return False
        self.num_plans += 1
        self.num_lane_plans += plan.is_decode
        assert told(plan) == told(naive)
        steady_before = len(self.allocator._steady.made)
        grant, report = self.allocator.serve(plan)
        self.num_steady += plan.is_decode and steady_before > 0 and report.num_granted is plan.num_wanted
        self.allocator.check()
        self._report(plan, report)
        if grant is not None:
            self.checker.announce(grant)
            assert not self.violations, self.violations
            for started in grant.started:
                self.sequence_in[started.slot] = started.sequence_id
                self.num_prompt[started.sequence_id] = started.num_prompt
                self.num_known[started.sequence_id] = len(started.token_ids)
            self.flights.append(grant)
            self.most_in_flight = max(self.most_in_flight, len(self.flights))
            decoding = [each for each in self.lanes._flights if each.has_decodes]
            assert len(decoding) <= self.num_lanes
        return True

    def _report(self, plan: StepPlan, report: PlanReport) -> None:
        self.lanes.on_report(report)
        self.naive.on_report(report)
        self.lanes.check()

    def _finish(self, grant: StepGrant) -> None:
        self.checker.complete(grant.step)
        if grant.generation <= self.voided or self.draw.random() < 0.02:
            self.voided = max(self.voided, grant.generation)
            guilty = self._both("on_void", StepVoid(grant.step, grant.generation, RuntimeError("drawn")))
            self.gone |= {sequence.sequence_id for sequence, _ in guilty}
            return
        slots, ids, places, is_finished = [], [], [], []
        counts = np.zeros(len(grant.slots), np.int32) if grant.drafts is None else grant.drafts.counts
        for slot, is_sampled, num_drafts in zip(
            grant.slots.tolist(), grant.is_sampled.tolist(), counts.tolist(), strict=True
        ):
            if not is_sampled:
                continue
            number = self.sequence_in[slot]
            limit = self.num_prompt[number] + self.wanted[number]
            for _ in range(1 + self.draw.randint(0, num_drafts)):
                if self.num_known[number] >= limit:
                    break
                slots.append(slot)
                ids.append(number)
                places.append(self.num_known[number] - self.num_prompt[number])
                self.answers.setdefault(number, []).append(places[-1])
                self.num_known[number] += 1
                is_finished.append(self.num_known[number] >= limit)
        arrays = (np.array(slots, np.intp), np.array(ids, np.int64), np.array(places, np.intp))
        tokens, finished = np.zeros(len(slots), np.intp), np.array(is_finished, np.bool_)
        done = StepDone(grant.step, *arrays, tokens, finished, most_tokens=1 + int(counts.max(initial=0)))
        self._both("on_done", done)


def told(plan: StepPlan) -> list[Any]:
    """A plan as plain data."""
    reserved = None if plan.num_reserved is None else plan.num_reserved.tolist()
    drafts = None if plan.drafts is None else (plan.drafts.counts.tolist(), plan.drafts.token_ids.tolist())
    started = [each.sequence_id for each in plan.started]
    columns = [plan.slots, plan.num_wanted, plan.reaches_end, plan.victims, plan.num_victims]
    numbers = [plan.step, plan.generation, plan.completed_step, plan.token_budget, reserved, drafts, started]
    lists = [list(plan.ended), list(plan.preempted), list(plan.dropped), list(plan.discarded), list(plan.voided)]
    return [*(column.tolist() for column in columns), *numbers, *lists, list(plan.accepted)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seed, num_plans, num_lane_plans = options.seed, 0, 0
    while num_plans < options.plans:
        walk = LanesWalk(seed)
        try:
            walk.run()
        except Exception:
            print(f"seed {seed}")
            raise
        seed, num_plans, num_lane_plans = seed + 1, num_plans + walk.num_plans, num_lane_plans + walk.num_lane_plans
    print(f"{num_plans} plans of {seed - options.seed} lives are equal; {num_lane_plans} are of a lane")


if __name__ == "__main__":
    main()
