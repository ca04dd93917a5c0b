"""Lanes: the decoding rows of a model whose layers are on several ranks, dealt over as many steps in flight.

A row's next token is known when its step is done, so it is in one step in flight only. While one rank computes the rows
of a lane, the other ranks compute those of the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..messages import Bools, Indices, Ints
from .service_order import ServiceOrder, SteadyDemand
from .slot_table import SlotTable


class Flight(Protocol):
    """A step in flight, as lanes see it: see `StepInFlight`."""

    @property
    def slots(self) -> Indices: ...
    @property
    def awaited(self) -> Indices: ...
    @property
    def has_decodes(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Rows that decode together."""

    demand: SteadyDemand
    first: int  # place in the service order of its first row
    last: int  # and of its last


class Lanes:
    """Chooses rows of a step beside those in flight.

    A step has at most a share of all decoding rows, 1 / `num_lanes`, and no more than `num_lanes` steps in flight have
    any. So lanes form, and rows that come or go even them out. Chunks of a prompt may follow each other, as their
    tokens are known.

    It remembers the demand of each lane until a row comes or goes, so that rows are not inspected again.
    """

    def __init__(self, num_lanes: int, table: SlotTable) -> None:
        self.num_lanes = num_lanes
        self._table = table
        self._service_order: ServiceOrder | None = None  # of the lanes
        self._lanes: list[Lane] = []  # no row is in two of them
        self._num_rows = 0  # of all lanes
        self.is_busy = False  # found by the last `free_lane`: all rows are in lanes, and wait for those in flight

    def clear(self) -> None:
        """Forgets all lanes."""
        self._lanes, self._num_rows = [], 0

    def drop(self, steady: SteadyDemand | None) -> None:
        """Forgets a lane, of which not all rows were granted their token."""
        if steady is not None and any(lane.demand is steady for lane in self._lanes):
            self._keep([lane for lane in self._lanes if lane.demand is not steady])

    def free_lane(self, service_order: ServiceOrder, flights: Collection[Flight]) -> SteadyDemand | None:
        """The lane whose rows are those to choose, if each row is in a lane. `is_busy` says whether no row may run."""
        num_rows, self.is_busy = len(service_order.slots), False
        if service_order is not self._service_order or self._num_rows != num_rows:
            return None
        num_decoding, free = 0, self._lanes
        for flight in flights:
            num_decoding += flight.has_decodes
            free = [lane for lane in free if lane.demand.slots is not flight.slots]
        if not free or num_decoding >= self.num_lanes:
            self.is_busy = True
            return None
        first = free[0]
        if len(free) > 1:
            first = min(free, key=lambda lane: lane.first)
            is_whole = len(first.demand.slots) == -(-num_rows // self.num_lanes)
            if not is_whole or any(lane.first < first.last for lane in free if lane is not first):
                return None
        return first.demand

    def are_filled_by(self, slots: Indices, service_order: ServiceOrder, flights: Collection[Flight]) -> bool:
        """Whether no row may run beside the flights and a step of `slots`: all rows are in lanes that are under way."""
        if service_order is not self._service_order or self._num_rows != len(service_order.slots):
            return False
        under_way = [slots, *(flight.slots for flight in flights)]
        return all(any(lane.demand.slots is one for one in under_way) for lane in self._lanes)

    def rows(
        self,
        service_order: ServiceOrder,
        num_left: Ints,
        is_decode: Bools,
        is_prefill: Bools,
        flights: Collection[Flight],
        row_limit: int,
        *,
        is_drafting: bool,
    ) -> tuple[SteadyDemand | None, Indices, Ints]:
        """(lane, slots, tokens wanted) of a step: decodes first, each group in the order of service.

        The arrays are [R] of `service_order`: tokens that are not computed, and whether a row can run and has one or
        several of these. The lane is None if the step is none of its own, as with prompts or drafts.
        """
        slots = service_order.slots
        if service_order is not self._service_order or is_drafting:
            self._service_order = service_order
            self.clear()
        is_awaited = np.zeros(self._table.num_slots, np.bool_)
        for flight in flights:
            is_awaited[flight.awaited] = True
        may_run = ~is_awaited[slots]
        num_decoding = int(np.count_nonzero(num_left == 1))
        most = -(-num_decoding // self.num_lanes)
        if sum(flight.has_decodes for flight in flights) >= self.num_lanes:
            most = 0
        decodes = (is_decode & may_run).nonzero()[0][: min(most, row_limit)]
        if len(decodes) and num_decoding == len(slots) and not is_drafting:
            lane = self._lane_of(service_order, slots[decodes], num_left[decodes], decodes)
            return lane, lane.slots, lane.num_wanted
        rows = np.concatenate([decodes, (is_prefill & may_run).nonzero()[0]])[:row_limit]
        return None, slots[rows], num_left[rows]

    def _lane_of(self, service_order: ServiceOrder, slots: Indices, ones: Ints, places: Indices) -> SteadyDemand:
        """The lane of these rows: the one that has them, or a new one in place of those that have some of them.

        `places` are the rows' in the service order.
        """
        for lane in self._lanes:
            found = lane.demand
            if len(found.slots) == len(slots) and np.array_equal(found.slots, slots) and found.num_plans > 0:
                return found
        made = SteadyDemand.begin(service_order, self._table, ones, slots)
        others = [lane for lane in self._lanes if not np.isin(lane.demand.slots, slots).any()]
        self._keep([*others, Lane(made, int(places[0]), int(places[-1]))])
        return made

    def _keep(self, lanes: list[Lane]) -> None:
        self._lanes, self._num_rows = lanes, sum(len(lane.demand.slots) for lane in lanes)
