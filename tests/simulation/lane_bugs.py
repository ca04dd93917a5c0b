"""Bugs of lanes to plant: the simulation with decoding rows in lanes must find every one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from millrace.stages.schedule.lanes import Lanes
from tests.simulation.planting import Bug, changed


def rows_in_flight_chosen_again() -> AbstractContextManager[None]:
    """A row is chosen although a step in flight decides its next token."""

    def change(rows: Any) -> Any:
        def blind(self: Lanes, *columns: Any, **options: Any) -> Any:
            *head, flights, row_limit = columns
            return rows(self, *head, (), row_limit, **options)

        return blind

    return changed(Lanes, "rows", change)


def lane_in_flight_taken_for_free() -> AbstractContextManager[None]:
    """The first lane is free although its step is in flight."""

    def change(free_lane: Any) -> Any:
        def blind(self: Lanes, service_order: Any, flights: Collection[Any]) -> Any:
            return free_lane(self, service_order, list(flights)[1:])

        return blind

    return changed(Lanes, "free_lane", change)


def steps_of_a_prompt_that_choose_a_token_not_waited_for() -> AbstractContextManager[None]:
    """A row decodes beside the step that has the last tokens of its prompt."""

    def change(rows: Any) -> Any:
        def blind(self: Lanes, *columns: Any, **options: Any) -> Any:
            *head, flights, row_limit = columns
            return rows(self, *head, [one for one in flights if one.has_decodes], row_limit, **options)

        return blind

    return changed(Lanes, "rows", change)


LANE_BUGS: dict[str, Bug] = {
    bug.__name__: bug
    for bug in (
        rows_in_flight_chosen_again,
        lane_in_flight_taken_for_free,
        steps_of_a_prompt_that_choose_a_token_not_waited_for,
    )
}
