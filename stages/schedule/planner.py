"""Chooses the rows of the next step: decodes first, then prefills, in policy order.

Plain code behind the schedule stage. `scheduler.py` tracks steps and assembles the plan, `admitter.py` admits and
preempts sequences, `step_budget.py` sets the token budget of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field

import numpy as np

from ...runtime.message import message
from ..array_checks import num_true, total
from ..messages import NO_INDICES, NO_INTS, Bools, Drafts, Indices, Ints, PlanReport
from .admitter import Admitter
from .lanes import Lanes
from .lifecycle import SequenceLifecycle
from .service_order import SteadyDemand, TokenDemand
from .speculation import Speculation
from .step_timing.step_budget import PrefillDemand, StepBudget
from .step_timing.step_time_model import StepContents


@message
class StepInFlight:
    """A granted step that is in flight."""

    step: int
    generation: int
    slots: Indices  # of its rows
    contents: StepContents | None  # for the step time model; None: there is none
    drafted: Mapping[int, int] = field(default_factory=dict)  # slot -> number of drafts
    awaited: Indices = field(
        default_factory=lambda: NO_INDICES
    )  # of rows that get a token, if a row may be in one step in flight only
    has_decodes: bool = False  # whether some of these had been computed but for their last token


class Planner:
    """Chooses one step at a time, after the report on the previous one.

    It admits and preempts sequences through `lifecycle`, and changes no other state of them. Its own state is only a
    cache: `SteadyDemand` holds the rows of the last step while nothing has changed, so that rows are not inspected
    again.
    """

    def __init__(
        self,
        lifecycle: SequenceLifecycle,
        admitter: Admitter,
        speculation: Speculation,
        step_size: StepBudget | None,  # None: always `most`
        most: int,  # tokens of a step, at most
        num_lanes: int = 1,  # above 1: a row is in one step in flight only, see `Lanes`
    ) -> None:
        self._lifecycle = lifecycle
        self._slots = lifecycle.slots
        self._waiting = lifecycle.waiting
        self._admitter = admitter
        self._speculation = speculation
        self._step_size = step_size
        self._most = most
        self._steady: SteadyDemand | None = None  # None, or of an earlier service order: inspect the rows again
        self._lanes = Lanes(num_lanes, lifecycle.slots) if num_lanes > 1 else None

    def choose(
        self, flights: Collection[StepInFlight], report: PlanReport | None, row_limit: int
    ) -> tuple[TokenDemand, Drafts | None, int]:
        """At most `row_limit` rows, perhaps none, with their drafts, and the token budget.

        `flights` are in flight; `report` is the last report.
        """
        if self._lifecycle.short_length:
            self._lifecycle.lengthen()
        if self._lifecycle.num_parked:
            self._admitter.move_parked(report)
        has_waiting = len(self._waiting) > 0
        if has_waiting and not self._slots.num_free:
            self._admitter.preempt_for_waiting()
        steady = self._same_again(flights, row_limit)
        if steady is not None and not has_waiting:
            return steady, None, self._most  # no prompt waits and no row drafts
        if self._lanes is not None and self._lanes.is_busy and not has_waiting:
            return TokenDemand.of(self._lifecycle.service_order, self._slots, NO_INDICES, NO_INTS), None, self._most
        slots, num_wanted, is_steady = self._rows(flights, row_limit)
        budget = self._token_budget(slots, num_wanted)
        if has_waiting and self._admitter.admit(budget - total(num_wanted), row_limit, report):
            slots, num_wanted, is_steady = self._rows(flights, row_limit)
        if is_steady:
            self._steady = SteadyDemand.begin(self._lifecycle.service_order, self._slots, num_wanted)
        demands = self._steady or TokenDemand.of(self._lifecycle.service_order, self._slots, slots, num_wanted)
        return demands, self._drafts(slots, num_wanted, budget), budget

    def leaves_rows(self, slots: Indices, flights: Collection[StepInFlight]) -> bool:
        """Whether a row may be left to run beside the flights and a step of `slots`; True if it is not known."""
        if self._lanes is None or len(self._waiting):
            return True
        return not self._lanes.are_filled_by(slots, self._lifecycle.service_order, flights)

    def steady_if_granted(self, report: PlanReport) -> SteadyDemand | None:
        """The rows of the last choice, if each got its token and no row has come or gone.

        Otherwise None, and the next choice inspects all rows.
        """
        steady = self._steady
        if (
            steady is None
            or report.num_granted is not steady.num_wanted
            or steady.service_order is not self._lifecycle.service_order
        ):
            if self._lanes is not None:
                self._lanes.drop(steady)
            self._steady = None
        return self._steady

    def refresh_rows(self) -> None:
        """Makes the next choice inspect all rows, although none has come or gone."""
        self._steady = None
        if self._lanes is not None:
            self._lanes.clear()

    # -- rows

    def _rows(self, flights: Collection[StepInFlight], row_limit: int) -> tuple[Indices, Ints, bool]:
        """(slots, tokens wanted) of the step: decodes first, each group in the order of service.

        Also returns whether a `SteadyDemand` of all rows begins with it.
        """
        steady = self._same_again(flights, row_limit)
        if steady is not None:
            return steady.slots, steady.num_wanted, False
        if self._lanes is not None and self._lanes.is_busy:
            return NO_INDICES, NO_INTS, False
        service_order, table = self._lifecycle.service_order, self._slots
        slots = service_order.slots
        self._speculation.follow_order(service_order, table)
        num_known = table.num_known[slots]
        num_left = num_known - table.num_computed[slots]
        is_runnable = num_known < table.limit[slots]
        is_decode = is_runnable & (num_left == 1)
        is_prefill = is_runnable & (num_left > 1)
        if self._lanes is not None:
            is_drafting = self._speculation.is_drafting or any(flight.drafted for flight in flights)
            self._steady, slots, num_wanted = self._lanes.rows(
                service_order, num_left, is_decode, is_prefill, flights, row_limit, is_drafting=is_drafting
            )
            return slots, num_wanted, False
        is_steady = 0 < len(slots) <= row_limit and num_true(is_decode) == len(slots)
        if self._speculation.is_drafting or any(flight.drafted for flight in flights):
            is_steady = False
            is_decode &= ~self._held(slots, flights, is_drafting_time=not num_true(is_prefill))
        self._steady = None
        if is_steady:
            return slots, num_left, True
        rows = np.concatenate([slots[is_decode], slots[is_prefill]])
        wanted = np.concatenate([num_left[is_decode], num_left[is_prefill]])
        return rows[:row_limit], wanted[:row_limit], False

    def _same_again(self, flights: Collection[StepInFlight], row_limit: int) -> SteadyDemand | None:
        """The demand of the last plan, or of a lane, if it still holds: one token for each row, and no drafts."""
        steady = self._steady
        if self._lanes is not None:
            steady = self._steady = self._lanes.free_lane(self._lifecycle.service_order, flights)
        if steady is None or steady.service_order is not self._lifecycle.service_order or steady.num_plans <= 0:
            return None
        return steady if len(steady.slots) <= row_limit else None

    def _held(self, slots: Indices, flights: Collection[StepInFlight], *, is_drafting_time: bool) -> Bools:
        """[R] rows that wait for a step in flight, which decides their position or drafts."""
        held = [slot for flight in flights for slot in flight.drafted]
        drafting = self._speculation.drafting()
        if is_drafting_time and any(np.isin(drafting, flight.slots).any() for flight in flights):
            held += drafting  # all of them, so that they draft together in one step
        is_held: Bools = np.isin(slots, held)
        return is_held

    # -- tokens

    def _token_budget(self, slots: Indices, num_wanted: Ints) -> int:
        """The token budget: limited by the target time only if the step mixes prefills and decodes."""
        size = self._step_size
        if size is None:
            return self._most
        num_decode = int(np.count_nonzero(num_wanted == 1))  # they are first in `slots`
        may_begin = len(self._waiting) and self._slots.num_free and not self._lifecycle.num_returning
        if not num_decode or (num_decode == len(slots) and not may_begin):
            return self._most
        starts = self._slots.num_computed[slots]
        num_context = int(starts[:num_decode].sum()) + num_decode
        prompts = zip(num_wanted[num_decode:].tolist(), starts[num_decode:].tolist(), strict=True)
        waiting = (PrefillDemand(self._admitter.num_to_compute(sequence), 0) for sequence in self._waiting)
        return size.choose(num_decode, num_context, [PrefillDemand(*prompt) for prompt in prompts], waiting)

    def _drafts(self, slots: Indices, num_wanted: Ints, token_budget: int) -> Drafts | None:
        """The drafts of the rows; None while any row computes a prompt."""
        if not self._speculation.is_drafting or np.count_nonzero(num_wanted > 1):
            return None
        return self._speculation.drafts(slots, self._slots, token_budget)
