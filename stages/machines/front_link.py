"""One front of an engine that has several: its link, and what it is told under its own numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ...runtime.env.log import get_logger
from ...runtime.processes.frames import LinkError
from ...runtime.processes.link import Link
from ...runtime.processes.transport import Transport
from ...runtime.processes.wire import WireError
from ..engine.engine_status import CoreReport
from ..fleet.front_table import FrontTable
from ..messages import StepTokens, TokenRequest
from ..split.protocol import (
    CODEC,
    ControlCauses,
    Drain,
    DropAdapter,
    ReadAdapter,
    RequestsEnded,
    Setup,
    StatusQuery,
    StatusReply,
    Stop,
)
from .front_channels import MAX_KEPT_STEPS, FrontRequests, FrontSteps

log = get_logger("millrace.stages")


class FrontOwner(Protocol):
    """What an engine offers to its fronts."""

    table: FrontTable
    requests: FrontRequests

    def welcome(self, front: FrontLink, setup: Setup) -> None:
        """A front has come. Adds it to the table, or sends why not."""

    def arrived(self, front: FrontLink, request: TokenRequest) -> None:
        """A prompt has come, as the engine knows it."""

    def note_causes(self, causes: ControlCauses) -> None:
        """Entries for the control lane, by the engine's numbers."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests have ended, by the engine's ids."""

    def answer(self, front: FrontLink, query: StatusQuery) -> StatusReply:
        """The answer to a question."""

    def ask_drain(self, by: str) -> None:
        """A front wants the engine to take no new requests, and to end; as in `Drain`."""

    def refused(self, front: FrontLink, step: StepTokens, error: WireError) -> None:
        """A step cannot be encoded for the front."""

    def lost(self, front: FrontLink, reason: str) -> None:
        """The front is gone. Called once."""


class FrontLink:
    """The link of one front, numbered `number`. Call `start` once; it ends by itself, or with `close`."""

    def __init__(
        self, number: int, transport: Transport, owner: FrontOwner, clock: Callable[[], float], timeout_s: float | None
    ) -> None:
        self.number = number
        self.num_seen = 0  # prompts that came
        self.is_welcome = False  # it is in the table
        self.wants_keys = False  # it names blocks as this engine does
        self.first_step = 0  # added to the engine's numbers of steps: each front has its own for each engine
        self._owner = owner
        self._is_over = False
        self._link = Link(transport, CODEC, self._receive, self._lost, timeout_s=timeout_s, only_reports=True)
        self._requests = owner.requests.add_end(self._translated)
        self.steps = FrontSteps(clock, self._refused, self._overrun)
        self._link.add_inbound(self._requests)
        self._link.add_outbound(self.steps.channel)

    def start(self) -> None:
        """Begins to send and receive."""
        self._link.start()

    def close(self) -> None:
        """Ends the link. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self.steps.close()
            self._owner.requests.drop_end(self._requests)
            self._link.close()

    # -- to the front

    def post(self, word: Any) -> bool:
        """Sends a message; returns whether it can be encoded for the front's version."""
        try:
            self._link.post(word)
        except WireError as error:
            log.error("link.refused", front=self.number, word=type(word).__name__, reason=str(error))
            return False
        return True

    def flush(self) -> None:
        """Sends at once what is due."""
        self._link.flush()

    def send(self, step: StepTokens) -> None:
        """Sends the front's part of a step."""
        self.steps.send(replace(step, step=step.step + self.first_step))

    def report(self, report: CoreReport) -> None:
        """Sends the engine's state, with the front's own sequences."""
        core, scheduler = report.core, report.core.scheduler
        if (all_of := core.sequences) is not None:
            rows, numbers = self._owner.table.rows_of(self.number, all_of.ids.tolist())
            columns = {name: getattr(all_of, name)[rows] for name in type(all_of).__dataclass_fields__ if name != "ids"}
            core = replace(core, sequences=replace(all_of, ids=np.array(numbers, np.int64), **columns))
        steps = {name: getattr(scheduler, name) + self.first_step for name in ("last_granted", "completed_step")}
        self.post(replace(report, core=replace(core, scheduler=replace(scheduler, **steps))))

    # -- from the front

    def _receive(self, word: Any) -> None:
        table, number = self._owner.table, self.number
        if not self.is_welcome and not isinstance(word, (Setup, Stop)):
            raise LinkError(f"{type(word).__name__} came before the front has said what it is")
        match word:
            case Setup() if not self.is_welcome:
                self._owner.welcome(self, word)
            case ControlCauses():
                self._owner.note_causes(ControlCauses(table.causes(number, word.causes)))
            case RequestsEnded():
                self._owner.forget(table.forget(number, word.request_ids))
            case StatusQuery():
                reply = self._owner.answer(self, word)
                if not self.post(reply):
                    self.post(StatusReply(word.number, error="the answer cannot be sent; see the engine's log"))
            case ReadAdapter():
                self.post(StatusReply(word.number, error="an engine of several fronts serves no adapters"))
            case Drain():
                self._owner.ask_drain(word.by)
            case DropAdapter():
                pass  # it has none
            case Stop():
                self._end("it has stopped")
            case _:
                raise LinkError(f"{type(word).__name__} is not a message of a front")

    def _translated(self, request: TokenRequest) -> TokenRequest:
        if not self.is_welcome:
            raise LinkError("a prompt came before the front has said what it is")
        self.num_seen += 1
        ours = self._owner.table.take(self.number, request)
        self._owner.arrived(self, ours)
        return ours

    # -- the end

    def _refused(self, step: StepTokens, error: WireError) -> None:
        self._owner.refused(self, step, error)

    def _overrun(self) -> None:
        # later: the step loop is in the middle of a step
        reason = f"it has not read {MAX_KEPT_STEPS} steps"
        asyncio.get_running_loop().call_soon(self._end, reason)

    def _lost(self, error: LinkError | None) -> None:
        self._end("the connection ended" if error is None else str(error))

    def _end(self, reason: str) -> None:
        if not self._is_over:
            self.close()
            self._owner.lost(self, reason)
