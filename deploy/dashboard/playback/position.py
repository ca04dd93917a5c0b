"""One viewer's position in a recording, and the state of schedule and allocate at it.

The data has the format of `snapshots.py`, which describes a running engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ....stages.allocate.prefix_tree import read_prefix_tree
from ....stages.engine.read_status import read_blocks, read_cache, read_owners, read_scheduler
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
        """The blocks at the position."""
        allocator = self._machine.core.allocate.allocator
        return BlockOwners(read_blocks(allocator), self._owners(), allocator.pool.block_size)

    def _owners(self) -> Mapping[int, str]:
        return read_owners(self._machine.core.schedule.scheduler)

    def position(self) -> dict[str, Any]:
        """The position, and the counts of steps and requests up to it."""
        scheduler = self._machine.core.schedule.scheduler
        steps = {"last_granted": scheduler.last_granted, "completed_step": scheduler.completed_step}
        return {"time_s": round(self.time_s, 6)} | steps | self.playback_data.counts(self.now_ns)

    def overview(self) -> dict[str, Any]:
        """As `snapshots.overview`."""
        core = self._machine.core
        scheduler = read_scheduler(core.schedule.scheduler)
        health = {"state": "replay", "stage": None, "reason": None}
        figures = core_figures(scheduler, read_cache(core.allocate.allocator))
        found = {"health": health, "num_live": len(self._live())} | figures
        return found | adapter_slots(scheduler.adapters, {})

    def requests(self, window: RequestWindow) -> dict[str, Any]:
        """The shown part of the list of live requests."""
        recorded = self.playback_data.film.recorded
        return page_of([self._row(recorded[name], sequences) for name, sequences in self._live().items()], window)

    def prefixes(self) -> dict[str, Any]:
        """The tree of the prefix cache; {} without one."""
        tree = read_prefix_tree(self._machine.core.allocate.allocator)
        return {} if tree is None else with_names(tree, self._owners(), {})

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
        core = self._machine.core
        slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
        generated_by_slot = core.schedule.scheduler.slots.num_generated
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
            "num_blocks": int(core.allocate.allocator.tables.num_blocks[slots].sum()) if slots else 0,
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
