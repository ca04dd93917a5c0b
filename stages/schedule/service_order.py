"""The order of service of running sequences, the order of their victims, and their token demand.

`allocate/preemption.py` takes victims in this order while blocks are missing. Plain, columnar state behind the schedule
stage; rebuilt when a sequence comes or goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_checks import num_true, total
from ..messages import Bools, Indices, Ints
from .slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class ServiceOrder:
    """The served slots in order, and the victims: parked slots, then served from the last."""

    slots: Indices  # [R]
    victims: Indices  # [V] in order of preemption
    num_victims: Ints  # [S] by slot: length of the prefix of `victims` that it may preempt
    has_reserves: bool  # whether any row reserves all its blocks at once

    @classmethod
    def of(cls, table: SlotTable) -> ServiceOrder:
        slots = table.served()
        parked = (table.is_running & table.is_parked).nonzero()[0]
        is_victim = table.reserve[slots] == 0
        has_reserves = num_true(is_victim) < len(slots)
        if has_reserves:
            is_victim[:1] = False  # the first served sequence is never preempted
            behind, victims = is_victim[::-1].cumsum()[::-1] - is_victim, slots[is_victim][::-1]
        else:
            behind, victims = np.arange(len(slots))[::-1], slots[:0:-1]
        num_victims = np.zeros(table.num_slots, np.int32)
        num_victims[slots] = behind + len(parked)
        return cls(slots, np.concatenate([parked, victims]), num_victims, has_reserves)


@dataclass(slots=True, eq=False)
class TokenDemand:
    """The token demand of a plan, by row: the columns of `StepPlan` with these names."""

    slots: Indices  # [R]
    num_wanted: Ints  # [R] without drafts
    reaches_end: Bools  # [R] always True
    victims: Indices  # [V]
    num_victims: Ints  # [R]
    num_reserved: Ints | None  # [R]

    @classmethod
    def of(cls, service_order: ServiceOrder, table: SlotTable, slots: Indices, num_wanted: Ints) -> TokenDemand:
        return cls(*_columns(service_order, table, slots, num_wanted))


@dataclass(slots=True, eq=False)
class SteadyDemand(TokenDemand):
    """The demand of decoding rows, one token each.

    It is reused step after step until a row comes or goes.
    """

    service_order: ServiceOrder  # for which it holds
    one_each: Ints  # [S] by slot: ones for the rows, zeros elsewhere
    num_plans: int  # plans for which it still holds: the fewest tokens that any row has left to generate
    num_context: int  # tokens to which the rows of the next plan attend

    @classmethod
    def begin(
        cls, service_order: ServiceOrder, table: SlotTable, ones: Ints, slots: Indices | None = None
    ) -> SteadyDemand:
        """The demand of rows of `service_order`, by default of all; `ones` [R] is 1 for each."""
        slots = service_order.slots if slots is None else slots
        one_each, num_known = np.zeros(table.num_slots, np.int32), table.num_known[slots]
        one_each[slots] = 1
        return cls(
            *_columns(service_order, table, slots, ones),
            service_order=service_order,
            one_each=one_each,
            num_plans=int(np.minimum.reduce(table.limit[slots] - num_known)),
            num_context=total(num_known),
        )

    def note_granted(self, table: SlotTable) -> None:
        """Records that each row was granted its token."""
        table.num_computed += self.one_each
        table.num_known += self.one_each
        self.num_plans -= 1
        self.num_context += len(self.slots)


def _columns(
    service_order: ServiceOrder, table: SlotTable, slots: Indices, num_wanted: Ints
) -> tuple[Indices, Ints, Bools, Indices, Ints, Ints | None]:
    """The fields of `TokenDemand`, in their order."""
    num_reserved = table.reserve[slots] if service_order.has_reserves else None
    return (
        slots,
        num_wanted,
        np.ones(len(slots), np.bool_),
        service_order.victims,
        service_order.num_victims[slots],
        num_reserved,
    )
