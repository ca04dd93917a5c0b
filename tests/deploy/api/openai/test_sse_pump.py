"""The path of chunks from an outbox to its client: correct, and in one write per loop turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.deploy.api.chat.answers import ChatAnswerBuilder
from millrace.deploy.api.completions.answers import CompletionAnswerBuilder
from millrace.deploy.api.openai.answers import AnswerBuilder
from millrace.deploy.api.openai.choice_state import ChoiceState
from millrace.deploy.api.openai.chunks import ChunkIterator
from millrace.deploy.api.openai.sse_pump import send_all
from millrace.runtime.wakeups import WOKEN_AT_ONCE
from millrace.stages.exit.outboxes import Outboxes, RequestOutbox
from millrace.stages.messages import Finish, FinishReason, Prompt, Request, StepText
from millrace.stages.outputs import ChoiceDelta
from millrace.stages.params import SamplingParams

ANSWERS = (ChatAnswerBuilder, CompletionAnswerBuilder)


class Wire:
    """Replaces `EventStream`: records the writes and how far the client has read."""

    def __init__(self) -> None:
        self.writes: list[list[bytes]] = []
        self.is_read = True  # the client has read everything
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.num_waits = 0

    @property
    def can_send_now(self) -> bool:
        return bool(self.writes) and self.is_read

    def send_now(self, bodies: Iterable[bytes]) -> None:
        assert self.can_send_now
        self.writes.append(list(bodies))

    async def send(self, bodies: Iterable[bytes]) -> None:
        self.writes.append(list(bodies))
        self.num_waits += 1
        await self.may_go_on.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [body for write in self.writes for body in write]


class Clients:
    """The streams of one server, and the exit stage that feeds them."""

    def __init__(
        self, shape: type[AnswerBuilder] = CompletionAnswerBuilder, n: int = 1, has_usage: bool = False
    ) -> None:
        self.exit = Outboxes()
        self._shape, self._n, self._has_usage = shape, n, has_usage
        self.boxes: list[RequestOutbox] = []

    def open(self) -> ChunkIterator:
        params = SamplingParams(max_tokens=1000, n=self._n)
        request = Request(f"r{len(self.boxes)}", (Prompt(text="a"),), params)
        self.boxes.append(self.exit.open(request))
        answer = self._shape("id", 1, "model", has_usage=self._has_usage, has_running_usage=False)
        return ChunkIterator(answer, self.boxes[-1], self._n)

    def send(self) -> tuple[Wire, asyncio.Task[None]]:
        wire = Wire()
        return wire, asyncio.get_running_loop().create_task(send_all(self.open(), wire))  # type: ignore[arg-type]

    def deliver(self, *texts: str, choice: int = 0, ends: bool = False) -> None:
        """One step, in which a choice of each stream gets its text."""
        ids = tuple(box.choices[choice].sequence_id for box in self.boxes)
        finishes = {row: Finish(FinishReason.STOP) for row in range(len(ids))} if ends else {}
        self.exit.deliver(StepText(0, ids, texts or ("",) * len(ids), (7,) * len(ids), finishes))


async def turns(num_turns: int = 4) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


texts_of_steps = st.lists(st.tuples(st.integers(0, 1), st.text(max_size=6), st.booleans()), min_size=1, max_size=12)


@given(shape=st.sampled_from(ANSWERS), steps=texts_of_steps, has_usage=st.booleans())
def test_what_is_pumped_is_byte_for_byte_what_is_iterated(
    shape: type[AnswerBuilder], steps: Sequence[tuple[int, str, bool]], has_usage: bool
) -> None:
    async def bodies_of(pumped: bool) -> list[bytes]:
        clients, wire = Clients(shape, 2, has_usage), Wire()
        chunks = clients.open()
        got: list[bytes] = []

        async def iterate() -> None:
            async for bodies in chunks:
                got.extend(bodies)

        task = asyncio.ensure_future(send_all(chunks, wire) if pumped else iterate())  # type: ignore[arg-type]
        for choice, text, is_turn in steps:
            clients.deliver(text, choice=choice)
            await turns(4 if is_turn else 0)
        for choice in range(2):
            clients.deliver("", choice=choice, ends=True)
            await turns()
        await task
        return wire.bodies if pumped else got

    assert asyncio.run(bodies_of(True)) == asyncio.run(bodies_of(False))


@given(shape=st.sampled_from(ANSWERS), text=st.text(min_size=1), has_usage=st.booleans())
def test_a_spliced_chunk_is_byte_for_byte_the_one_encoded_whole(
    shape: type[AnswerBuilder], text: str, has_usage: bool
) -> None:
    answer = shape('id-\x00é"', 1, "a/model", has_usage=has_usage, has_running_usage=False)
    first, again = (answer.chunks(ChoiceState(3), ChoiceDelta(3, text, (1,)))[0] for _ in range(2))
    piece = {"delta": {"content": text}} if shape is ChatAnswerBuilder else {"text": text}
    choice = {"index": 3, **piece, "logprobs": None, "finish_reason": None, "stop_reason": None}
    whole = {"id": answer.id, "object": shape.CHUNK, "created": 1, "model": "a/model", "choices": [choice]}
    assert first == again == orjson.dumps(whole | ({"usage": None} if has_usage else {}))


def test_what_came_in_one_turn_is_one_write_and_wakes_no_task() -> None:
    async def test() -> None:
        clients = Clients()
        wire, task = clients.send()
        await turns()
        clients.deliver("a")
        await turns()
        for text in "bcd":
            clients.deliver(text)
        await turns(1)
        assert len(wire.writes) == 2 and b'"bcd"' in wire.writes[1][0]
        assert wire.num_waits == 1  # for the first stream only
        clients.deliver("e", ends=True)
        await task
        assert len(wire.writes) == 3 and b'"finish_reason":"stop"' in wire.writes[2][0]

    run(test())


def test_more_streams_than_one_turn_takes_are_written_in_the_next() -> None:
    async def test() -> None:
        clients, num_streams = Clients(), WOKEN_AT_ONCE + 1
        sent = [clients.send() for _ in range(num_streams)]
        await turns()
        clients.deliver(*"a" * num_streams)
        await turns()
        clients.deliver(*"b" * num_streams)
        await turns(1)
        assert [len(wire.writes) for wire, _ in sent] == [2] * WOKEN_AT_ONCE + [1]
        await turns(1)
        assert [len(wire.writes) for wire, _ in sent] == [2] * num_streams
        clients.deliver(*"c" * num_streams, ends=True)
        await asyncio.gather(*(task for _, task in sent))

    run(test())


def test_a_client_that_does_not_read_delays_no_other_and_loses_nothing() -> None:
    async def test() -> None:
        clients = Clients()
        (slow, waiting), (quick, task) = clients.send(), clients.send()
        await turns()
        clients.deliver("a", "a")
        await turns()
        slow.is_read = False
        slow.may_go_on.clear()
        for text in "bcdef":
            clients.deliver(text, text)
            await turns()
        assert len(quick.writes) == 6
        assert len(slow.writes) == 2  # the second waits; the outbox joins the rest
        slow.may_go_on.set()
        slow.is_read = True
        await turns()
        assert b'"cdef"' in slow.writes[2][0]
        clients.deliver("", "", ends=True)
        await asyncio.gather(waiting, task)

    run(test())


def test_the_error_that_ends_a_request_is_raised_where_it_is_sent_and_nowhere_else() -> None:
    async def test() -> None:
        clients = Clients()
        (_, broken), (whole, task) = clients.send(), clients.send()
        await turns()
        clients.deliver("a", "a")
        await turns()
        clients.exit.end("r0", "error", ValueError("lost"))
        with pytest.raises(Exception, match="internal error"):
            await broken
        clients.deliver("", "b", ends=True)
        await task
        assert b'"b"' in whole.writes[1][0]

    run(test())


@pytest.mark.parametrize("is_ringing", [False, True])
def test_a_task_that_is_cancelled_leaves_its_outbox_as_it_was(is_ringing: bool) -> None:
    async def test() -> None:
        clients = Clients()
        wire, task = clients.send()
        wakeup = clients.boxes[0].wakeup
        await turns()
        clients.deliver("a")
        await turns()
        assert wakeup.waiter is not None
        if is_ringing:
            clients.deliver("b")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turns()
        assert wakeup.waiter is None and not wakeup.is_going
        clients.deliver("c")
        await turns()
        assert len(wire.writes) <= 2

    run(test())
