"""Chooses what the next step runs: decodes before prefills, and otherwise as the policy says.

Plain code behind the schedule stage. Knows who runs and who waits, and what drafts are under way; refuses to know which
step it is, what became of those before, and what allocate must be told (`scheduler.py` does). Who is let in, and who
gives way, is in `admitter.py`; how much a step may hold, in `step_budget.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field

import numpy as np

from ...runtime.message import message
from ..messages import Bools, Drafts, Indices, Ints, PlanReport
from .admitter import Entrance
from .lifecycle import Lives
from .service_order import Steady, Wishes
from .speculation import Speculation
from .step_budget import StepSize, Wish
from .step_time_model import StepContents


@message
class Flight:
    """A granted step that is not done yet."""

    step: int
    generation: int
    slots: Indices  # of the rows it runs
    contents: StepContents | None  # for who chooses the size of steps
    drafted: Mapping[int, int] = field(default_factory=dict)  # slot -> drafts


class Planner:
    """Asked for one step at a time, once it is known what was granted of the one before.

    Lets sequences in and takes slots away, as `lives` then says; all else it leaves as it is. What it keeps is only
    that nothing has changed (`Steady`), which saves looking at each row again.
    """

    def __init__(
        self,
        lives: Lives,
        entrance: Entrance,
        speculation: Speculation,
        step_size: StepSize | None,  # None: always the most
        most: int,  # tokens of a step
    ) -> None:
        self._lives = lives
        self._slots = lives.slots
        self._waiting = lives.waiting
        self._entrance = entrance
        self._speculation = speculation
        self._step_size = step_size
        self._most = most
        self._steady: Steady | None = None  # None, or of another lineup: rows are to be looked at

    def choose(
        self, flights: Collection[Flight], report: PlanReport | None, row_limit: int
    ) -> tuple[Wishes, Drafts | None, int]:
        """At most `row_limit` rows, perhaps none, what they draft, and the token budget; `flights` are under way, and
        `report` is the last one that came."""
        if self._lives.num_parked:
            self._entrance.move_parked(report)
        has_waiting = len(self._waiting) > 0
        if has_waiting and not self._slots.num_free:
            self._entrance.make_way()
        steady = self._same_again(row_limit)
        if steady is not None and not has_waiting:
            return steady, None, self._most  # no prompt to leave room for, and nobody drafts
        slots, num_wanted = self._rows(flights, row_limit)
        budget = self._token_budget(slots, num_wanted)
        if has_waiting and self._entrance.admit(budget - int(num_wanted.sum()), row_limit, report):
            slots, num_wanted = self._rows(flights, row_limit)
        wishes = self._steady or Wishes.of(self._lives.lineup, self._slots, slots, num_wanted)
        return wishes, self._drafts(slots, num_wanted, budget), budget

    def steady_if_granted(self, report: PlanReport) -> Steady | None:
        """The rows of the last choice, if each got its one token and nobody has come or gone since. If not, they are
        looked at again."""
        steady = self._steady
        if steady is None or report.num_granted is not steady.num_wanted or steady.lineup is not self._lives.lineup:
            self._steady = None
        return self._steady

    def look_again(self) -> None:
        """Rows may want something else than they did, though nobody has come or gone."""
        self._steady = None

    # -- rows

    def _rows(self, flights: Collection[Flight], row_limit: int) -> tuple[Indices, Ints]:
        """The rows to ask for, decodes first, each group in the order of service: (slots, tokens wanted)."""
        steady = self._same_again(row_limit)
        if steady is not None:
            return steady.slots, steady.num_wanted
        lineup, table = self._lives.lineup, self._slots
        slots = lineup.slots
        self._speculation.line_up(lineup, table)
        num_left = table.num_known[slots] - table.num_computed[slots]
        is_runnable = table.num_known[slots] < table.limit[slots]
        is_decode = is_runnable & (num_left == 1)
        is_prefill = is_runnable & (num_left > 1)
        is_steady = 0 < len(slots) <= row_limit and np.count_nonzero(is_decode) == len(slots)
        if self._speculation.is_drafting or any(flight.drafted for flight in flights):
            is_steady = False
            is_decode &= ~self._held(slots, flights, is_drafting_time=not np.count_nonzero(is_prefill))
        if is_steady:
            self._steady = Steady.begin(lineup, table, num_left)
            return slots, num_left
        self._steady = None
        rows = np.concatenate([slots[is_decode], slots[is_prefill]])
        wanted = np.concatenate([num_left[is_decode], num_left[is_prefill]])
        return rows[:row_limit], wanted[:row_limit]

    def _same_again(self, row_limit: int) -> Steady | None:
        """What the last plan asked for, if it is to be asked for again: one token for each row, and no drafts."""
        steady = self._steady
        if steady is None or steady.lineup is not self._lives.lineup or steady.num_plans <= 0:
            return None
        return steady if len(steady.slots) <= row_limit else None

    def _held(self, slots: Indices, flights: Collection[Flight], *, is_drafting_time: bool) -> Bools:
        """[R] rows that wait for the outcome of a step: it decides how far they have come, or what to draft behind."""
        held = [slot for flight in flights for slot in flight.drafted]
        drafting = self._speculation.drafting()
        if is_drafting_time and any(np.isin(drafting, flight.slots).any() for flight in flights):
            held += drafting  # all of them, so that they go on together, in one step
        is_held: Bools = np.isin(slots, held)
        return is_held

    # -- tokens

    def _token_budget(self, slots: Indices, num_wanted: Ints) -> int:
        """Tokens of the step: where it is to compute prompts beside answers, as its target allows."""
        size = self._step_size
        if size is None:
            return self._most
        num_decode = int(np.count_nonzero(num_wanted == 1))  # they come first
        may_begin = len(self._waiting) and self._slots.num_free and not self._lives.num_returning
        if not num_decode or (num_decode == len(slots) and not may_begin):
            return self._most
        starts = self._slots.num_computed[slots]
        num_context = int(starts[:num_decode].sum()) + num_decode
        prompts = zip(num_wanted[num_decode:].tolist(), starts[num_decode:].tolist(), strict=True)
        in_line = (Wish(self._entrance.num_to_compute(sequence), 0) for sequence in self._waiting)
        return size.choose(num_decode, num_context, [Wish(*prompt) for prompt in prompts], in_line)

    def _drafts(self, slots: Indices, num_wanted: Ints, token_budget: int) -> Drafts | None:
        """What rows are to compute besides; nothing while any computes a prompt."""
        if not self._speculation.is_drafting or np.count_nonzero(num_wanted > 1):
            return None
        return self._speculation.drafts(slots, self._slots, token_budget)
