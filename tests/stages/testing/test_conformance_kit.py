"""The conformance kit: correct stages pass it, and a stage with any one of the seeded bugs fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from millrace.runtime.stage import Context, Crash, Outlet, Stage, stage
from millrace.stages.messages import StepText, StepVoid
from millrace.stages.testing import BrokenPromise, conformance
from tests.stages.grants import grant
from tests.stages.split.test_split import tokens

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Note:
    request_id: str
    text: str


def make_note(request_id: str, i: int) -> Note:
    return Note(request_id, f"note {i}")


class Upper(Stage[Note, Note]):
    """A correct stage, from which the buggy ones below are derived. Takes some time for each batch."""

    def __init__(self) -> None:
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    async def pause(self) -> None:
        assert self._context is not None
        await self._context.env.sleep(self._context.env.random("upper").uniform(0.0, 0.5))

    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        for note in batch:
            await self.pause()
            out.send(replace(note, text=note.text.upper()))


# -- correct stages


def test_a_sound_stage_passes() -> None:
    conformance(Upper, make_note)


def test_sound_functions_pass_one_by_one_and_several_at_once() -> None:
    def make(at_once: int) -> Any:
        @stage(concurrency=at_once)
        async def shout(note: Note) -> Note:
            await asyncio.sleep(0.1 * (len(note.text) % 3))
            return replace(note, text=note.text.upper())

        return shout

    conformance(lambda: make(1), make_note)
    conformance(lambda: make(3), make_note)


def test_a_stage_that_multiplies_items_passes_and_one_that_swallows_items_fails() -> None:
    @stage
    async def twice(note: Note) -> AsyncIterator[Note]:
        yield note
        await asyncio.sleep(0)
        yield note

    @stage
    def odd_ones(note: Note) -> Note | None:
        return note if int(note.text.split()[-1]) % 2 else None

    conformance(lambda: twice, make_note, seeds=4)
    with pytest.raises(BrokenPromise, match="item 0, alone, never came out"):
        conformance(lambda: odd_ones, make_note, seeds=1)


def test_a_stage_with_state_that_recovers_passes() -> None:
    class Counter(Upper):
        on_crash = Crash.RECOVER

        async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
            for note in batch:
                try:
                    out.send(replace(note, text=note.text.upper()))
                except RuntimeError as error:
                    out.fail(note, error)

    conformance(Counter, make_note, seeds=4)


def test_a_stage_that_flushes_as_it_goes_and_one_that_replies_pass() -> None:
    class Flushes(Upper):
        async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
            for note in batch:
                upper = replace(note, text=getattr(note, "text", "poison").upper())
                out.send(upper)
                await out.flush()

    class Replies(Upper):
        async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
            for note in batch:
                if note.text.endswith("3"):
                    out.reply(note)
                else:
                    out.send(note)

    conformance(Replies, make_note, seeds=4, is_ordered=False)
    conformance(Flushes, make_note, make_poison=lambda request_id, i: Note(request_id, "fine"), seeds=4)


# -- seeded bugs, each with the promise that it breaks


class Reorders(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        await super().handle(list(reversed(batch)), out)


class LosesTheLastOfABatch(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        await super().handle(batch if len(batch) < 3 else batch[:-1], out)


class Duplicates(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        await super().handle(batch, out)
        if len(batch) > 2:
            out.send(batch[0])


class SwallowsCancellation(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        for note in batch:
            with contextlib.suppress(asyncio.CancelledError):
                await self.pause()
            out.send(note)


class SwallowsCancellationOfAnItem(SwallowsCancellation):
    concurrency = 3  # type: ignore[assignment]


class DropsOnDrain(Upper):
    """Waits for a second item before it sends the first one."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Note] = []

    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        self._kept += batch
        if len(self._kept) > 1:
            kept, self._kept = self._kept, []
            await super().handle(kept, out)


class BuffersWithoutBound(Upper):
    """Takes everything at once, and sends it from a task of its own."""

    async def setup(self, context: Context) -> None:
        await super().setup(context)
        self._kept: list[Note] = []
        self._out: Outlet[Note] | None = None
        self._arrived = asyncio.Event()
        self._sending = asyncio.create_task(self._send())

    async def teardown(self) -> None:
        self._sending.cancel()

    async def _send(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._kept and self._out is not None:
                self._out.send(self._kept.pop(0))
                await self._out.flush()

    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        for note in batch:
            note.text.upper()
        self._kept += batch
        self._out = out
        self._arrived.set()


class LetsAPoisonItemKillTheBatch(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        try:
            await super().handle(batch, out)
        except RuntimeError as error:
            for note in batch:
                out.fail(note, error)


class ForgetsAPoisonItem(Upper):
    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        for note in batch:
            with contextlib.suppress(RuntimeError):
                await super().handle([note], out)


class LeavesATaskBehind(Upper):
    async def setup(self, context: Context) -> None:
        await super().setup(context)
        self._watching = asyncio.create_task(asyncio.sleep(1e9))


class KeepsStateOfEachRequest(Upper):
    """Forgets a request with its last item, but not one that was cancelled before that."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, list[str]] = {}

    async def handle(self, batch: Sequence[Note], out: Outlet[Note]) -> None:
        for note in batch:
            self._texts.setdefault(note.request_id, []).append(note.text)
            await self.pause()
            out.send(note)


class ForgetsEndedRequests(KeepsStateOfEachRequest):
    def ended(self, request_id: str, cause: str) -> None:
        self._texts.pop(request_id, None)


class ForgetsEndedRequestsSeveralAtOnce(ForgetsEndedRequests):
    concurrency = 3  # type: ignore[assignment]


@pytest.mark.parametrize("sound", [ForgetsEndedRequests, ForgetsEndedRequestsSeveralAtOnce])
def test_a_stage_that_forgets_ended_requests_passes(sound: type[Upper]) -> None:
    conformance(sound, make_note, seeds=8)


# -- messages of a step, which name no request


def make_text(request_id: str, i: int) -> StepText:
    return StepText(i, [2 * i, 2 * i + 1], [f"text {i}", "more"], [7, 8])


class Redact(Stage[StepText, StepText]):
    """Counts the tokens of each sequence until its request ends."""

    def __init__(self, forgets: bool = True) -> None:
        self.num_tokens: dict[int, int] = {}
        self._sequence_ids: dict[str, int] = {}
        self._forgets = forgets

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            for sequence_id in step.sequence_ids:
                self.num_tokens[sequence_id] = self.num_tokens.get(sequence_id, 0) + 1
            out.send(replace(step, texts=[text.upper() for text in step.texts]))

    def ended(self, request_id: str, cause: str) -> None:
        if self._forgets:
            self.num_tokens.clear()  # a real stage would know its sequences


def test_stages_of_messages_without_a_request_pass() -> None:
    conformance(Redact, make_text, seeds=4)
    with pytest.raises(BrokenPromise, match=r"num_tokens still holds \d+ of request-\d+"):
        conformance(lambda: Redact(forgets=False), make_text, seeds=1)


def test_stages_of_plans_and_grants_pass() -> None:
    @stage
    def watch(item: Any) -> Any:
        return item

    conformance(lambda: watch, lambda request_id, i: grant([(0, 0, 1, True)], step=i), seeds=2)
    conformance(lambda: watch, lambda request_id, i: tokens(3, [(i, 0, 5)]), seeds=2)
    conformance(lambda: watch, lambda request_id, i: StepVoid(i, 0, None), seeds=2)


@pytest.mark.parametrize(
    ("bug", "promise"),
    [
        (Reorders, "order"),
        (LosesTheLastOfABatch, "once"),
        (Duplicates, "once"),
        (SwallowsCancellation, "cancel"),
        (SwallowsCancellationOfAnItem, "cancel"),
        (DropsOnDrain, "drain"),
        (BuffersWithoutBound, "bounded memory"),
        (LetsAPoisonItemKillTheBatch, "error isolation"),
        (ForgetsAPoisonItem, "error isolation"),
        (LeavesATaskBehind, "clean stop"),
        (KeepsStateOfEachRequest, "forgetting"),
    ],
)
def test_a_stage_with_a_seeded_bug_fails_and_hears_which_promise_it_broke(bug: type[Upper], promise: str) -> None:
    with pytest.raises(BrokenPromise) as caught:
        conformance(bug, make_note)
    assert caught.value.promise == promise, str(caught.value)


def test_a_stage_with_ports_of_its_own_is_refused_with_their_names() -> None:
    class Forks(Stage[Note, Note]):
        outputs = {"left": Note, "right": Note}

    with pytest.raises(ValueError, match="has the ports in, left, right: must be in and out"):
        conformance(Forks, make_note)
