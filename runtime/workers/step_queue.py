"""The device's queue of steps: the phases of step n all run before step n + 1 begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .worker import IMMEDIATELY, ON_REQUEST, Job, WhenDone, Worker

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Early:
    run: Callable[[], Any]
    result: asyncio.Future[Any]
    when_done: WhenDone


class StepQueue:
    """Passes each step to one device thread, phase by phase, whatever the order of submission.

    Step `n`, phase `p` goes to the thread after (n, p - 1), and (n + 1, 0) after the last phase of n. So a stage may
    submit the forward pass of the next step before the current one is sampled. The thread never reads state that an
    earlier phase has yet to write, and never idles for a hop through the event loop.
    Steps are numbered without gaps from `first_step`. A phase that will not be submitted must be `skip`ped.
    """

    def __init__(self, worker: Worker, num_phases: int, first_step: int = 0) -> None:
        self._worker = worker
        self.first_step = first_step
        self._num_phases = num_phases
        self._next = (first_step, 0)
        self._quiet: asyncio.Future[Any] | None = None  # of the phase before, if its result is delivered IF_ASKED
        self._early: dict[tuple[int, int], _Early] = {}

    @property
    def next_step(self) -> int:
        """The first step with a phase that was not handed to the thread yet."""
        return self._next[0]

    def submit(
        self, step: int, phase: int, run: Callable[[], R], when_done: WhenDone = IMMEDIATELY
    ) -> asyncio.Future[R]:
        """Runs `run()` on the device thread when its turn comes.

        Resolves on the loop with its result or error. A result of `ON_REQUEST` must be awaited before the step's next
        phase is submitted; afterwards it is dropped.
        """
        ticket = (step, phase)
        if ticket == self._next:
            if self._quiet is not None:
                self._worker.forget(self._quiet)
            result = self._worker.submit(run, when_done=when_done)
            self._quiet = result if when_done is ON_REQUEST else None
            self._advance()
            if self._early:
                self._hand_over()
            return result
        if ticket < self._next or ticket in self._early:
            raise AssertionError(f"step {step} phase {phase} was submitted before; next is {self._next}")
        promise: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if when_done is ON_REQUEST:
            ignore_error(promise)
        self._early[ticket] = _Early(run, promise, when_done)
        return promise

    def skip(self, step: int, phase: int) -> None:
        """Declares that (step, phase) will not be submitted. Does nothing if it was."""
        if (step, phase) >= self._next and (step, phase) not in self._early:
            self.submit(step, phase, _nothing).cancel()

    def _hand_over(self) -> None:
        """Hands over the jobs that were submitted early and whose turn has come."""
        while self._early and (job := self._early.pop(self._next, None)) is not None:
            self._advance()
            if job.result.cancelled():
                continue
            try:
                submitted = self._worker.submit(job.run, when_done=job.when_done)
            except Exception as error:  # the worker is closed: the stage that waits for this phase must hear of it
                job.result.set_exception(error)
            else:
                chain(submitted, job.result)

    def _advance(self) -> None:
        step, phase = self._next
        self._next = (step, phase + 1) if phase + 1 < self._num_phases else (step + 1, 0)


def _nothing() -> None:
    return None


def ignore_error(future: asyncio.Future[Any]) -> None:
    """Suppresses the log line about an error that is never retrieved.

    A caller that awaits still gets the error.
    """
    if isinstance(future, Job):
        future.is_error_ignored = True  # a callback would take 1.5 us and a handle of the loop
    else:
        future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def chain(source: asyncio.Future[Any], target: asyncio.Future[Any]) -> None:
    """Copies the outcome of `source` to `target`, unless `target` is done, such as cancelled."""

    def copy_outcome(done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if target.done():
            return
        if done.cancelled():
            target.cancel()
        elif error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(copy_outcome)
