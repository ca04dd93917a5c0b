"""One viewer's place in a recording: the books of schedule and allocate as they were at that moment, as plain data.

In the shapes that `snapshots.py` gives of an engine that runs.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from ...stages.recordings.film import Life
from ...stages.recordings.time_machine import Preemption, TimeMachine
from ...stages.schedule.sequence import Sequence
from .block_map import Books
from .reel import Reel
from .snapshots import core_figures

MAX_PREEMPTIONS = 100  # told
STATES = ("running", "swapped", "preempted", "parked", "waiting")  # of several, the first one is told


class Playhead:
    """One viewer's place in a reel. Going somewhere takes a while, so it is done in a thread, by one at a time."""

    def __init__(self, reel: Reel) -> None:
        self.reel = reel
        self.time_s = 0.0  # since the recording began
        self._machine: TimeMachine = reel.film.machine.another()

    @property
    def now_s(self) -> float:
        """The moment, on the engine's clock."""
        return self.reel.film.began_s + self.time_s

    @property
    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.now_s * 1e9)

    def go(self, time_s: float) -> None:
        """Goes there, or to the end if it comes first."""
        time_s = min(max(0.0, time_s), self.reel.film.duration_s)
        self._machine.go(time_s)
        self.time_s = time_s

    def books(self) -> Books:
        """Who holds which block. Do not keep it."""
        core = self._machine.core
        allocator = core.allocate.allocator
        return Books(allocator.pool, allocator.tables, core.schedule.scheduler)

    def position(self) -> dict[str, Any]:
        """Where it is, and what had come to pass by then."""
        scheduler = self._machine.core.schedule.scheduler
        steps = {"last_granted": scheduler.last_granted, "completed_step": scheduler.completed_step}
        return {"time_s": round(self.time_s, 6)} | steps | self.reel.counts(self.now_ns)

    def overview(self) -> dict[str, Any]:
        """As `snapshots.overview`."""
        core = self._machine.core
        allocator = core.allocate.allocator
        host = None if allocator.host is None else allocator.host.pool
        health = {"state": "replay", "stage": None, "reason": None}
        figures = core_figures(core.schedule.scheduler, allocator.cache, allocator.pool, host)
        return {"health": health, "num_live": len(self._live())} | figures

    def requests(self, offset: int, limit: int, *, newest_first: bool) -> dict[str, Any]:
        """As `snapshots.requests`."""
        live = self._live()
        ids = reversed(live) if newest_first else iter(live)
        rows = [self._row(self.reel.film.lives[name], live[name]) for name in islice(ids, offset, offset + limit)]
        return {"num_live": len(live), "offset": offset, "rows": rows}

    def preemptions(self) -> dict[str, Any]:
        """The last ones, newest first, each with its reason."""
        found = self._machine.preemptions
        chosen = reversed(found[-MAX_PREEMPTIONS:])
        return {"num_preemptions": len(found), "rows": [_preemption(each) for each in chosen]}

    def _live(self) -> dict[str, list[Sequence]]:
        """request id -> its sequences that are not over, in the order in which requests came to schedule."""
        live: dict[str, list[Sequence]] = {}
        for sequence in self._machine.core.schedule.scheduler.sequences.values():
            live.setdefault(sequence.request_id, []).append(sequence)
        return live

    def _row(self, life: Life, sequences: list[Sequence]) -> dict[str, Any]:
        books = self.books()
        slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
        told = books.scheduler.slots.num_generated
        num_generated = sum(
            int(told[one.slot]) if one.slot >= 0 else len(one.token_ids) - one.num_prompt for one in sequences
        )
        states = {sequence.state.value for sequence in sequences}
        is_parked = any(sequence.is_parked for sequence in sequences)
        has_begun = life.began_s is not None and life.began_s <= self.now_s
        ttft_s = None
        if life.first_token_s is not None and life.first_token_s <= self.now_s:
            ttft_s = round(life.first_token_s - life.arrival_s, 6)
        return {
            "id": life.request_id,
            "stage": "execute" if "running" in states else "schedule",
            "state": "parked" if is_parked else next((state for state in STATES if state in states), "finishing"),
            "arrival_s": round(life.arrival_s, 3),
            "ttft_s": ttft_s,
            "num_choices": life.num_sequences,
            "num_prompt_tokens": life.num_prompt_tokens,
            "num_cached_tokens": life.num_cached_tokens if has_begun else 0,
            "num_generated_tokens": num_generated,
            "max_tokens": sum(sequence.limit - sequence.num_prompt for sequence in sequences) or None,
            "num_blocks": int(books.block_tables.num_blocks[slots].sum()) if slots else 0,
            "priority": life.priority,
            "num_preempted": sum(sequence.num_preempted for sequence in sequences),
        }


def _preemption(told: Preemption) -> dict[str, Any]:
    values = asdict(told) | {"beneficiaries": list(told.beneficiaries)}
    return values | {"sentence": str(told)}
