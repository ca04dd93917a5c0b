"""Bugs of an asynchronous device, to plant: a missing wait, a buffer that is used too soon.

Each is a context manager that puts one into the real classes. The simulation on streams must find every one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from millrace.kernels.layout import step_state
from millrace.runtime.device_streams.simulated import SimStream
from millrace.runtime.workers.in_order import InOrder
from millrace.stages.backends.cuda import step_submission
from millrace.stages.backends.cuda.async_device import AsyncDevice
from millrace.stages.backends.cuda.guide_uploads import GuideUploads
from millrace.stages.backends.cuda.pinned_ring import SendRing
from millrace.stages.backends.cuda.step_submission import StepSubmitter, SubmittedStep
from millrace.stages.device.device_guard import DeviceGuard
from millrace.stages.messages import StepGrant, StepTokens
from tests.simulation.memory_bugs import early_reuse
from tests.simulation.planting import Bug, changed


def fence_dropped() -> AbstractContextManager[None]:
    """A released block is free at once, whatever steps in flight still touch it."""
    return early_reuse()


def told_when_submitted() -> AbstractContextManager[None]:
    """A step counts as done as soon as all of it is submitted."""

    return changed(step_submission, "_wait", lambda wait: lambda step: None)


def attended_beside_others() -> AbstractContextManager[None]:
    """The host computes a step before the results of earlier steps are reported."""
    return changed(InOrder, "do_all", lambda do_all: lambda self: None)


def guide_without_its_tokens() -> AbstractContextManager[None]:
    """A guide is written before the results of earlier steps are applied."""
    return changed(StepSubmitter, "await_results", lambda await_results: lambda self, grant: None)


def guide_read_before_it_is_there() -> AbstractContextManager[None]:
    """A step is sampled while its guide is still being uploaded."""

    def change(send: Any) -> Any:
        def hasty(self: GuideUploads, write: Any) -> None:
            compute, self._compute = self._compute, SimpleNamespace(wait=lambda event: None)  # type: ignore
            send(self, write)
            self._compute = compute

        return hasty

    return changed(GuideUploads, "send", change)


def guide_overwritten() -> AbstractContextManager[None]:
    """A guide is uploaded while the step before still reads its own."""
    return changed(GuideUploads, "note_read", lambda note_read: lambda self: None)


def told_before_its_swaps() -> AbstractContextManager[None]:
    """A step counts as done when its results are there, though it still copies blocks."""

    def change(finish: Any) -> Any:
        def hasty(self: StepSubmitter, step: SubmittedStep) -> StepTokens:
            step.has_swaps = False
            tokens: StepTokens = finish(self, step)
            return tokens

        return hasty

    return changed(StepSubmitter, "finish", change)


@contextmanager
def void_told_at_once() -> Iterator[None]:
    """A step that failed half submitted counts as done while the device still runs that half.

    Without the check of the device either, which waits for all that is submitted.
    """

    def change(finish: Any) -> Any:
        def hasty(self: AsyncDevice, grant: StepGrant, submitted: asyncio.Future[SubmittedStep]) -> StepTokens:
            if (error := submitted.exception()) is not None:
                raise error
            tokens: StepTokens = finish(self, grant, submitted)
            return tokens

        return hasty

    async def no_check(self: DeviceGuard, step: int, error: BaseException) -> None:
        pass

    with changed(AsyncDevice, "_finish", change), changed(DeviceGuard, "check", lambda check: no_check):
        yield


def results_not_behind_done() -> AbstractContextManager[None]:
    """The stream of results does not wait for the step's `done`."""
    return _deaf("results")


def result_overwritten() -> AbstractContextManager[None]:
    """A step is sampled while the result of the one before is still being read."""
    return changed(StepSubmitter, "_before", lambda _: lambda self, step: step)


def diff_buffer_taken_too_soon() -> AbstractContextManager[None]:
    """A pinned buffer is written again before the copy that reads it is done."""

    def change(take: Any) -> Any:
        def hasty(self: SendRing) -> Any:
            at, self._next = self._next, (self._next + 1) % len(self._buffers)
            return self._buffers[at], self._sent[at]

        return hasty

    return changed(SendRing, "take", change)


def swap_in_not_waited_for() -> AbstractContextManager[None]:
    """A step runs while blocks that it reads are still on their way from the host."""
    return changed(step_submission, "_is_touched", lambda _: lambda grant: False)


def swap_out_not_behind_its_writers() -> AbstractContextManager[None]:
    """Blocks are copied out while earlier steps still write them."""
    return _deaf("swaps")


def line_not_entered() -> AbstractContextManager[None]:
    """The device's thread does not use the stream that steps run on."""
    return changed(StepSubmitter, "enter", lambda enter: lambda self: None)


def stream_not_used() -> AbstractContextManager[None]:
    """A thread that switches streams goes on with its old one."""
    return changed(SimStream, "use", lambda use: lambda self: None)


def finished_row_written_again() -> AbstractContextManager[None]:
    """A row whose sequence has finished on the device goes on as if it had not."""

    def change(make_inputs: Any) -> Any:
        def blind(diff: Any, slots: Any, buffers: Any, block_size: int) -> None:
            finished = slots.state[:, step_state.FINISHED].copy()
            slots.state[:, step_state.FINISHED] = step_state.GOES_ON
            make_inputs(diff, slots, buffers, block_size)
            slots.state[:, step_state.FINISHED] = finished

        return blind

    return changed(step_state, "make_inputs", change)


def wrong_drafts_kept() -> AbstractContextManager[None]:
    """The device takes the tokens of a whole run, also those after a wrong draft."""
    return changed(step_state, "_in_runs_so_far", lambda so_far: lambda is_right, runs: np.ones(len(runs), np.bool_))


def drafts_trusted() -> AbstractContextManager[None]:
    """The device takes each draft for right, whatever was chosen before it."""

    def change(note_tokens: Any) -> Any:
        def hasty(out: Any, chosen: Any, buffers: Any, slots: Any) -> None:
            drafted = buffers.runs > 1
            chosen[drafted] = buffers.input_ids[buffers.logits_rows[drafted] + 1]
            note_tokens(out, chosen, buffers, slots)

        return hasty

    return changed(step_state, "note_tokens", change)


def _deaf(name: str) -> AbstractContextManager[None]:
    """One stream waits for no event."""

    def change(wait: Any) -> Any:
        def hasty(self: SimStream, event: Any) -> None:
            if self.name != name:
                wait(self, event)

        return hasty

    return changed(SimStream, "wait", change)


DEVICE_BUGS: Mapping[str, Bug] = {
    bug.__name__: bug
    for bug in (
        fence_dropped,
        told_when_submitted,
        attended_beside_others,
        guide_without_its_tokens,
        guide_read_before_it_is_there,
        guide_overwritten,
        told_before_its_swaps,
        void_told_at_once,
        results_not_behind_done,
        result_overwritten,
        diff_buffer_taken_too_soon,
        swap_in_not_waited_for,
        swap_out_not_behind_its_writers,
        line_not_entered,
        stream_not_used,
        finished_row_written_again,
        wrong_drafts_kept,
        drafts_trusted,
    )
}
