"""Bugs to plant: each is a context manager that puts one into the real classes. The simulation must find every one.

Those of memory are in `memory_bugs.py`, those of an asynchronous device in `device_bugs.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from millrace.runtime.channel import Channel
from millrace.runtime.exit import Exit
from millrace.runtime.wakeups import WakeupBatch
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_publisher import PrefixPublisher
from millrace.stages.allocate.slot_blocks import SlotBlocks
from millrace.stages.exit.outboxes import AnswerBuffer, RequestOutbox
from millrace.stages.messages import StepPlan
from millrace.stages.sample.draft_acceptance import NO_DRAFT, DraftRuns
from millrace.stages.schedule.lifecycle import SequenceLifecycle
from millrace.stages.schedule.planner import Planner
from millrace.stages.schedule.scheduler import Scheduler
from millrace.stages.schedule.sequence import State
from tests.simulation.memory_bugs import MEMORY_BUGS
from tests.simulation.planting import Bug, changed


def lost_free_on_abort() -> AbstractContextManager[None]:
    """Schedule does not report sequences to allocate that end in another way than on the device."""

    def change(end: Any) -> Any:
        def lossy(self: SequenceLifecycle, sequence_id: int) -> None:
            sequence = self.sequences.get(sequence_id)
            end(self, sequence_id)
            is_told = sequence is not None and self.updates.ended[-1:] == [sequence.slot]
            if is_told and sequence_id not in finished_by_device:
                self.updates.ended.pop()

        return lossy

    finished_by_device: set[int] = set()

    @contextmanager
    def planted() -> Iterator[None]:
        on_done = Scheduler.on_done

        def noting(self: Scheduler, done: Any) -> None:
            finished_by_device.update(done.sequence_ids[done.is_finished].tolist())
            on_done(self, done)
            finished_by_device.clear()

        with MonkeyPatch.context() as patch, changed(SequenceLifecycle, "end", change):
            patch.setattr(Scheduler, "on_done", noting)
            yield

    return planted()


def short_keys_found_by_long_sequences() -> AbstractContextManager[None]:
    """The prefix cache does not tell keys with the rotary factors of short sequences from others."""

    def change(start: Any) -> Any:
        return lambda self, started: start(self, replace(started, is_long=False))

    return changed(PrefixPublisher, "start", change)


def missed_wake_up() -> AbstractContextManager[None]:
    """A sender cancelled after it was promised room keeps the room: the senders behind it are never woken."""

    def change(wait: Any) -> Any:
        async def lossy(self: Channel[Any]) -> None:
            promise: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._senders.append(promise)
            await promise

        return lossy

    return changed(Channel, "_wait_for_room", change)


def bells_beyond_a_turn_forgotten() -> AbstractContextManager[None]:
    """Of stages that ring together, those beyond the limit of one loop callback are never woken."""

    def change(wake_some: Any) -> Any:
        def forgetful(self: WakeupBatch) -> None:
            wake_some(self)
            self._set.clear()

        return forgetful

    return changed(WakeupBatch, "_wake_some", change)


def duplicate_terminal_event() -> AbstractContextManager[None]:
    """A choice that has ended repeats its end at each read of its client."""

    def change(take: Any) -> Any:
        def repeating(self: AnswerBuffer) -> Any:
            self.is_finish_delivered = False
            return take(self)

        return repeating

    return changed(AnswerBuffer, "take", change)


def second_end() -> AbstractContextManager[None]:
    """The exit forgets that a request has ended while it runs the callbacks."""

    def change(end: Any) -> Any:
        def again(self: Exit[Any], request_id: str, cause: str, error: BaseException | None = None) -> bool:
            outbox = self.live.get(request_id)
            is_ended: bool = end(self, request_id, cause, error)
            if is_ended and outbox is not None and cause == "cancel":
                for callback in self.on_end:
                    callback(outbox, cause, error)
            return is_ended

        return again

    return changed(Exit, "end", change)


def sleeping_client() -> AbstractContextManager[None]:
    """The end of a request does not wake its client."""

    def change(end: Any) -> Any:
        def silent(self: RequestOutbox, cause: str, error: BaseException | None) -> None:
            self.wakeup, wakeup = WakeupBatch().wakeup(), self.wakeup  # one without a waiter
            end(self, cause, error)
            self.wakeup = wakeup

        return silent

    return changed(RequestOutbox, "end", change)


def swap_kept_despite_void() -> AbstractContextManager[None]:
    """Blocks that a void step should have copied to the host count as copied."""

    def change(give_up: Any) -> Any:
        def gullible(self: SequenceLifecycle, void_step: int) -> None:
            pass

        return gullible

    return changed(SequenceLifecycle, "give_up_swapped", change)


def lost_host_blocks() -> AbstractContextManager[None]:
    """Sequences that end while they are swapped out leave their blocks on the host for good."""

    def change(discard: Any) -> Any:
        def silent(self: SequenceLifecycle, sequence: Any) -> None:
            discard(self, sequence)
            self.updates.discarded.clear()

        return silent

    return changed(SequenceLifecycle, "_discard", change)


def parked_for_good() -> AbstractContextManager[None]:
    """A sequence parked after it lost its blocks does not return to the queue."""

    def change(unpark: Any) -> Any:
        def forgetful(self: SequenceLifecycle, sequence_id: int) -> None:
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence.state is not State.PARKED:
                unpark(self, sequence_id)

        return forgetful

    return changed(SequenceLifecycle, "unpark", change)


def trusted_drafts() -> AbstractContextManager[None]:
    """The token after the first wrong draft counts, too."""

    def change(that_count: Any) -> Any:
        def trusting(self: DraftRuns, token_ids: Any) -> Any:
            rows = that_count(self, token_ids)
            more = rows[self.drafts[rows] != NO_DRAFT] + 1
            return np.union1d(rows, more)

        return trusting

    return changed(DraftRuns, "that_count", change)


def drafts_computed_for_good() -> AbstractContextManager[None]:
    """Drafts count as computed, right or wrong."""

    def change(serve: Any) -> Any:
        def gullible(self: Allocator, plan: StepPlan) -> Any:
            grant, report = serve(self, plan)
            if grant is not None and grant.drafts is not None:
                self.tables.num_tokens[grant.slots] += grant.drafts.counts
            return grant, report

        return gullible

    def change_note(apply_updates: Any) -> Any:
        def deaf(self: SlotBlocks, plan: StepPlan) -> None:
            apply_updates(self, replace(plan, accepted=()))

        return deaf

    @contextmanager
    def planted() -> Iterator[None]:
        with changed(Allocator, "serve", change), changed(SlotBlocks, "apply_updates", change_note):
            yield

    return planted()


def accepted_drafts_forgotten() -> AbstractContextManager[None]:
    """Accepted drafts are not reported to allocate."""

    def change(apply_updates: Any) -> Any:
        def deaf(self: SlotBlocks, plan: StepPlan) -> None:
            apply_updates(self, replace(plan, accepted=()))

        return deaf

    return changed(SlotBlocks, "apply_updates", change)


def drafting_rows_run_ahead() -> AbstractContextManager[None]:
    """A row is planned again before it is known how many of its drafts were right."""

    def change(held: Any) -> Any:
        def hasty(self: Planner, slots: Any, flights: Any, *, is_drafting_time: bool) -> Any:
            return np.zeros(len(slots), np.bool_)

        return hasty

    return changed(Planner, "_held", change)


BUGS: Mapping[str, Bug] = MEMORY_BUGS | {
    bug.__name__: bug
    for bug in (
        lost_free_on_abort,
        short_keys_found_by_long_sequences,
        missed_wake_up,
        bells_beyond_a_turn_forgotten,
        duplicate_terminal_event,
        sleeping_client,
        second_end,
        swap_kept_despite_void,
        lost_host_blocks,
        parked_for_good,
        trusted_drafts,
        drafts_computed_for_good,
        accepted_drafts_forgotten,
        drafting_rows_run_ahead,
    )
}
