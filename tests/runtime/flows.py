"""Small pipelines for the tests of the runtime: words go in, each request gets its words back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.runtime.exit import Exit
from millrace.runtime.graph import Port
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.stage import Outlet, Stage


@dataclass(frozen=True)
class Word:
    """The request's only word. `is_last` words end it."""

    request_id: str
    text: str = ""
    is_last: bool = True


class WordBox:
    """An outbox of words."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.events: deque[str] = deque()
        self.cause: str | None = None
        self.error: BaseException | None = None
        self.num_ends = 0
        self._ready = asyncio.Event()

    def put(self, text: str) -> None:
        assert self.cause is None, "an event after the terminal one"
        self.events.append(text)
        self._ready.set()

    def end(self, cause: str, error: BaseException | None) -> None:
        self.num_ends += 1
        self.cause, self.error = cause, error
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[str]:
        while True:
            while self.events:
                yield self.events.popleft()
            if self.cause is not None:
                if self.error is not None:
                    raise self.error
                return
            self._ready.clear()
            await self._ready.wait()


class Words(Exit[WordBox]):
    """The exit: a word goes to its request's outbox, and the last one ends it."""

    inputs = {"in": Word}

    def make_outbox(self, request: Word) -> WordBox:
        return WordBox(request.request_id)

    def deliver(self, item: Word) -> None:
        box = self.live.get(item.request_id)
        if box is not None:
            box.put(item.text)
            if item.is_last:
                self.end(item.request_id, "finished")


class Pass(Stage[Word, Word]):
    """Passes words on, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.num_setups = 0
        self.num_teardowns = 0

    async def setup(self, context: Any) -> None:
        self.num_setups += 1

    async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
        self.batches.append([word.text for word in batch])
        for word in batch:
            out.send(word)

    async def teardown(self) -> None:
        self.num_teardowns += 1


class Slow(Pass):
    """Takes `batch_s` for a batch."""

    def __init__(self, env: SimEnv, batch_s: float = 1.0) -> None:
        super().__init__()
        self.env = env
        self.batch_s = batch_s

    async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
        await self.env.sleep(self.batch_s)
        await super().handle(batch, out)


class Poison(Pass):
    """Crashes on words with this prefix, after it has sent them and the ones before."""

    def __init__(self, error: type[BaseException] = LookupError) -> None:
        super().__init__()
        self.error = error

    async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
        for word in batch:
            out.send(word)
            if word.text.startswith("poison"):
                raise self.error(word.text)
        self.batches.append([word.text for word in batch])


def line(*stages: Stage[Any, Any], env: SimEnv | None = None, capacity: int = 4) -> Pipeline:
    """The stages one after another, and an exit behind them."""
    pipeline = Pipeline()
    if env is not None:
        pipeline.use(env)
    names = [pipeline.add(each) for each in (*stages, Words())]
    pipeline.entry = Port(names[0], "in")
    for source, target in zip(names, names[1:], strict=False):
        pipeline.connect(source, target, capacity=capacity, reason="a test")
    return pipeline


async def outcome(pipeline: Pipeline, word: Word) -> Any:
    """The answer, or the error that ended the request."""
    try:
        return await pipeline.call(word)
    except Exception as error:
        return error
