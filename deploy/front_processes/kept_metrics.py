"""The metrics of all fronts, as the supervisor keeps them: the last of each, and the counters of those that ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .front_metrics import add_ended, empty
from .words import MetricsSum, MetricsTaken, MetricsWanted

ANSWER_S = 1.0  # that a front may take to tell its metrics; then the last known ones count


class FrontHandle(Protocol):
    """A front, as far as it gets messages."""

    def post(self, word: Any) -> None:
        """Sends a message."""


class KeptMetrics:
    """Answers fronts that ask for the metrics of all. `live` are the fronts that have a process.

    `model_of` tells the model of a front, if there are several.
    """

    def __init__(
        self,
        live: Callable[[], Mapping[int, FrontHandle]],
        model_of: Callable[[int], str | None] = lambda front: None,
    ) -> None:
        self._live, self._model_of = live, model_of
        self._known: dict[int, bytes] = {}
        self._ended = empty()
        self._numbers = itertools.count()
        self._awaited: dict[int, tuple[set[int], asyncio.Event]] = {}  # question -> fronts that have not answered
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, front: int, word: MetricsTaken) -> None:
        """A front tells its own."""
        self._known[front] = word.data
        if (awaited := self._awaited.get(word.number)) is not None:
            self._note_answer(awaited, front)

    def note_end(self, front: int) -> None:
        """A front has ended: its counters stay. Idempotent."""
        if (data := self._known.pop(front, None)) is not None:
            self._ended = add_ended(self._ended, data, self._model_of(front))
        for awaited in self._awaited.values():
            self._note_answer(awaited, front)

    def ask(self, asker: FrontHandle, number: int) -> None:
        """Asks all fronts, and then answers the one that asked."""
        task = asyncio.create_task(self._answer(asker, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asker: FrontHandle, number: int) -> None:
        question, live = next(self._numbers), self._live()
        awaited = self._awaited[question] = (set(live), asyncio.Event())
        for slot in live.values():
            slot.post(MetricsWanted(question))
        try:
            async with asyncio.timeout(ANSWER_S):
                await awaited[1].wait()
        except TimeoutError:
            pass  # one hangs, or has just started
        finally:
            del self._awaited[question]
        asker.post(MetricsSum(number, dict(self._known), self._ended))

    @staticmethod
    def _note_answer(awaited: tuple[set[int], asyncio.Event], front: int) -> None:
        awaited[0].discard(front)
        if not awaited[0]:
            awaited[1].set()
