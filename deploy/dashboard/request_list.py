"""The list of live requests: filtered, sorted and cut to the shown part.

Rows have the format of `snapshots.request_row`. For a running engine, `LiveRequests` makes only the shown rows at each
update. Their order needs a row of every request, so it is made anew at most once a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from .messages import RequestWindow
from .snapshots import is_found, request_row

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import EngineStatus
    from ...stages.exit.outboxes import RequestOutbox

MAX_ROWS = 200  # requests listed in one update
MAX_SORTED = 4_096  # requests that are sorted, filtered and counted: the oldest ones
MIN_S, SHARE = 1.0, 0.004  # between two orders, and the maximum share of time for them
STATES = ("running", "finishing", "arriving", "waiting", "swapped", "preempted", "parked")  # in the order of a sort
MAX_CHOICES = 40  # adapters and priorities named as choices of a filter

Row = Mapping[str, Any]

KEYS: dict[str, Callable[[Row], Any]] = {
    "arrival": lambda row: row["arrival_s"],
    "id": lambda row: row["id"],
    "state": lambda row: STATES.index(row["state"]) if row["state"] in STATES else len(STATES),
    "adapter": lambda row: row.get("adapter", ""),
    "prompt": lambda row: row["num_prompt_tokens"],
    "cached": lambda row: row["num_cached_tokens"],
    "answer": lambda row: row["num_generated_tokens"],
    "ttft": lambda row: float("inf") if row["ttft_s"] is None else row["ttft_s"],
    "blocks": lambda row: row["num_blocks"],
    "priority": lambda row: row["priority"],
    "preempted": lambda row: row["num_preempted"],
}


def arranged(rows: Sequence[Row], window: RequestWindow) -> list[Row]:
    """The rows that the filters of `window` keep, in its order; equal ones in order of arrival."""
    found = [row for row in rows if _is_kept(row, window)]
    if window.sort != "arrival":
        found.sort(key=KEYS[window.sort], reverse=window.descending)
    elif window.descending or window.newest_first:
        found.reverse()
    return found


def page_of(rows: Sequence[Row], window: RequestWindow) -> dict[str, Any]:
    """The shown part of `rows`, which are all live requests in order of arrival."""
    found = arranged(rows, window)
    shown = found[window.offset : window.offset + min(window.limit, MAX_ROWS)]
    return {"num_live": len(found), "offset": window.offset, "rows": shown} | choices_of(rows)


def choices_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What the filters can choose from: value -> number of requests. `total` counts all."""
    states = Counter(row["state"] for row in rows)
    adapters = Counter(row.get("adapter", "") for row in rows)
    priorities = Counter(row["priority"] for row in rows)
    return {
        "total": len(rows),
        "states": {state: states[state] for state in STATES if states[state]},
        "adapters": dict(adapters.most_common(MAX_CHOICES)),
        "priorities": {str(priority): count for priority, count in sorted(priorities.items())[:MAX_CHOICES]},
    }


class LiveRequests:
    """The list of a running engine for one viewer."""

    def __init__(self) -> None:
        self._ids: list[str] = []  # in the order asked for, as it was when last made
        self._choices: dict[str, Any] = {}
        self._asked: tuple[Any, ...] | None = None
        self._due_s = 0.0

    def page(
        self, engine: Engine, status: EngineStatus, window: RequestWindow, only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """The shown part of the list, of the requests in `only` unless it is None."""
        assert engine.pipeline.exit is not None
        live = engine.pipeline.exit.live
        if only is not None:
            live = {request_id: outbox for request_id, outbox in live.items() if request_id in only}
        self._arrange(engine, status, window, live)
        if window.is_plain:
            outboxes = {name: outbox for name, outbox in live.items() if is_found(window.search, outbox)}
            ids = list(reversed(outboxes)) if window.descending or window.newest_first else list(outboxes)
        else:
            ids = [request_id for request_id in self._ids if request_id in live]
        shown = islice(ids, window.offset, window.offset + min(window.limit, MAX_ROWS))
        rows = [request_row(engine, status, live[request_id]) for request_id in shown]
        return {"num_live": len(ids), "offset": window.offset, "rows": rows} | self._choices | {"total": len(live)}

    def _arrange(
        self, engine: Engine, status: EngineStatus, window: RequestWindow, live: Mapping[str, RequestOutbox]
    ) -> None:
        asked = window.arrangement
        began_s = time.monotonic()
        if asked == self._asked and began_s < self._due_s:
            return
        rows = [request_row(engine, status, outbox) for outbox in islice(live.values(), MAX_SORTED)]
        self._choices = choices_of(rows)
        if not window.is_plain:
            self._ids = [row["id"] for row in arranged(rows, window)]
        now_s = time.monotonic()
        self._asked, self._due_s = asked, now_s + max(MIN_S, (now_s - began_s) / SHARE)


def _is_kept(row: Row, window: RequestWindow) -> bool:
    return (
        (not window.search or window.search in row["id"] or window.search in row.get("adapter", ""))
        and (window.state is None or row["state"] == window.state)
        and (window.adapter is None or row.get("adapter", "") == window.adapter)
        and (window.priority is None or row["priority"] == window.priority)
    )
