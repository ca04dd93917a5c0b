"""One viewer's position in a recording, and the state of schedule and allocate at it.

The data has the format of `snapshots.py`, which describes a running engine.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ....stages.allocate.prefix_tree import read_prefix_tree
from ....stages.recordings.film import RecordedRequest
from ....stages.recordings.time_machine import Preemption, TimeMachine
from ....stages.schedule.sequence import Sequence
from ..adapters import SHORT, adapter_slots
from ..block_map import BlockOwners
from ..messages import RequestWindow
from ..prefixes import with_names
from ..request_list import page_of
from ..snapshots import core_figures
from .data import PlaybackData

MAX_PREEMPTIONS = 100  # rows in the list
STATES = ("running", "swapped", "preempted", "parked", "waiting")  # a request shows the first that applies


class PlaybackPosition:
    """One viewer's position in a recording. `go` is slow: call it in a thread, and not concurrently."""

    def __init__(self, playback_data: PlaybackData) -> None:
        self.playback_data = playback_data
        self.time_s = 0.0  # from the start of the recording
        self._machine: TimeMachine = playback_data.film.machine.another()

    @property
    def now_s(self) -> float:
        """The position on the engine's clock."""
        return self.playback_data.film.began_s + self.time_s

    @property
    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.now_s * 1e9)

    def go(self, time_s: float) -> None:
        """Moves to `time_s` seconds from the start, at most to the end."""
        time_s = min(max(0.0, time_s), self.playback_data.film.duration_s)
        self._machine.go(time_s)
        self.time_s = time_s

    def block_owners(self) -> BlockOwners:
        """Pool, block tables and scheduler at the position. Valid until the next `go`."""
        core = self._machine.core
        allocator = core.allocate.allocator
        return BlockOwners(allocator.pool, allocator.tables, core.schedule.scheduler)

    def position(self) -> dict[str, Any]:
        """The position, and the counts of steps and requests up to it."""
        scheduler = self._machine.core.schedule.scheduler
        steps = {"last_granted": scheduler.last_granted, "completed_step": scheduler.completed_step}
        return {"time_s": round(self.time_s, 6)} | steps | self.playback_data.counts(self.now_ns)

    def overview(self) -> dict[str, Any]:
        """As `snapshots.overview`."""
        core = self._machine.core
        allocator = core.allocate.allocator
        host = None if allocator.host is None else allocator.host.pool
        health = {"state": "replay", "stage": None, "reason": None}
        figures = core_figures(core.schedule.scheduler, allocator.cache, allocator.pool, host)
        found = {"health": health, "num_live": len(self._live())} | figures
        return found | adapter_slots(core.schedule.scheduler.adapters, {})

    def requests(self, window: RequestWindow) -> dict[str, Any]:
        """The shown part of the list of live requests."""
        recorded = self.playback_data.film.recorded
        return page_of([self._row(recorded[name], sequences) for name, sequences in self._live().items()], window)

    def prefixes(self) -> dict[str, Any]:
        """The tree of the prefix cache; {} without one."""
        tree = read_prefix_tree(self._machine.core.allocate.allocator)
        return {} if tree is None else with_names(tree, self.block_owners().owners(), {})

    def preemptions(self) -> dict[str, Any]:
        """The last preemptions, newest first, each with its reason."""
        found = self._machine.preemptions
        chosen = reversed(found[-MAX_PREEMPTIONS:])
        return {"num_preemptions": len(found), "rows": [_preemption(each) for each in chosen]}

    def _live(self) -> dict[str, list[Sequence]]:
        """request id -> its unfinished sequences, in order of the requests' arrival at schedule."""
        live: dict[str, list[Sequence]] = {}
        for sequence in self._machine.core.schedule.scheduler.sequences.values():
            live.setdefault(sequence.request_id, []).append(sequence)
        return live

    def _row(self, recorded: RecordedRequest, sequences: list[Sequence]) -> dict[str, Any]:
        block_owners = self.block_owners()
        slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
        generated_by_slot = block_owners.scheduler.slots.num_generated
        num_generated = sum(
            int(generated_by_slot[one.slot]) if one.slot >= 0 else len(one.token_ids) - one.num_prompt
            for one in sequences
        )
        states = {sequence.state.value for sequence in sequences}
        is_parked = any(sequence.is_parked for sequence in sequences)
        has_begun = recorded.began_s is not None and recorded.began_s <= self.now_s
        ttft_s = None
        if recorded.first_token_s is not None and recorded.first_token_s <= self.now_s:
            ttft_s = round(recorded.first_token_s - recorded.arrival_s, 6)
        return {
            "id": recorded.request_id,
            "stage": "execute" if "running" in states else "schedule",
            "state": "parked" if is_parked else next((state for state in STATES if state in states), "finishing"),
            "arrival_s": round(recorded.arrival_s, 3),
            "ttft_s": ttft_s,
            "num_choices": recorded.num_sequences,
            "num_prompt_tokens": recorded.num_prompt_tokens,
            "num_cached_tokens": recorded.num_cached_tokens if has_begun else 0,
            "num_generated_tokens": num_generated,
            "max_tokens": sum(sequence.limit - sequence.num_prompt for sequence in sequences) or None,
            "num_blocks": int(block_owners.block_tables.num_blocks[slots].sum()) if slots else 0,
            "priority": recorded.priority,
            "num_preempted": sum(sequence.num_preempted for sequence in sequences),
        } | self._adapter(sequences)

    def _adapter(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The adapter of a request by its digest, as a recording has no names."""
        digest, lines = sequences[0].adapter, self._machine.core.schedule.scheduler.adapters
        if not digest or lines is None:
            return {}
        is_waiting = all(sequence.slot < 0 for sequence in sequences)
        return {"adapter": digest[:SHORT], "waits_for_adapter": is_waiting and not lines.slots.may_join(digest)}


def _preemption(preemption: Preemption) -> dict[str, Any]:
    values = asdict(preemption) | {"beneficiaries": list(preemption.beneficiaries)}
    return values | {"sentence": str(preemption)}
