"""Scheduling policies of the simulated loop: which ready callback runs next.

A policy is a function that takes one handle out of a non-empty list. All its choices come from a seeded stream.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

POLICIES = ("uniform", "pct", "fifo")  # and "starve:<pattern>"

Pick = Callable[[list[Any]], Any]  # takes one handle out of a non-empty list


def policy_of(policy: str, stream: random.Random) -> Pick:
    if policy == "uniform":
        return _uniform(stream)
    if policy == "fifo":
        return lambda ready: ready.pop(0)
    if policy == "pct":
        return _pct(stream)
    if policy.startswith("starve:"):
        return _starve(policy.removeprefix("starve:"), stream)
    raise ValueError(f"policy {policy!r} is unknown: use one of {', '.join(POLICIES)} or starve:<task name pattern>")


class SimTask(asyncio.Task[Any]):
    """A task numbered in order of creation.

    Its hash is the number, so sets of tasks (asyncio's own, anyio's) iterate in the same order in every process.
    """

    def __init__(self, coro: Any, *, number: int, priority: float, **kwargs: Any) -> None:
        self.number = number
        self.priority = priority
        self.label = ""
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def set_name(self, value: object, /) -> None:
        super().set_name(value)
        self.label = f"{self.number} {value}"


def _uniform(stream: random.Random) -> Pick:
    draw = stream.random

    def pick(ready: list[Any]) -> Any:
        last = ready.pop()
        i = int(draw() * (len(ready) + 1))
        if i == len(ready):
            return last
        handle, ready[i] = ready[i], last
        return handle

    return pick


def _pct(stream: random.Random) -> Pick:
    """Probabilistic concurrency testing: the ready task of the highest priority runs.

    At random moments its priority falls below all others. Callbacks without a task, oldest first, get every second
    turn: anyio repeats one until a task has taken its cancellation, so neither side may wait for the other to end.
    """
    until_change = stream.randrange(1, 1_000)
    lowest = 0.0

    def pick(ready: list[Any]) -> Any:
        nonlocal until_change, lowest
        chosen, chosen_at, callback_at = None, 0, -1
        for i, handle in enumerate(ready):
            task = task_of(handle)
            if task is None:
                callback_at = i if callback_at < 0 else callback_at
            elif chosen is None or task.priority > chosen.priority:
                chosen, chosen_at = task, i
        if chosen is None or (callback_at >= 0 and stream.random() < 0.5):
            return ready.pop(callback_at)
        until_change -= 1
        if until_change <= 0:
            until_change = stream.randrange(1, 1_000)
            lowest -= 1.0
            chosen.priority = lowest
        return ready.pop(chosen_at)

    return pick


def _starve(pattern: str, stream: random.Random) -> Pick:
    """Any but the starved tasks, while another task is ready.

    Callbacks do not count, for the reason in `_pct`.
    """
    pick_any = _uniform(stream)
    starved: dict[int, bool] = {}  # a task's number -> whether it is starved

    def pick(ready: list[Any]) -> Any:
        others, has_task = [], False
        for i, handle in enumerate(ready):
            task = getattr(handle._callback, "__self__", None)
            if type(task) is not SimTask:
                others.append(i)
            elif not (starved[task.number] if task.number in starved else classify(task)):
                others.append(i)
                has_task = True
        if not has_task:
            return pick_any(ready)
        return ready.pop(others[int(stream.random() * len(others))])

    def classify(task: SimTask) -> bool:
        starved[task.number] = fnmatchcase(task.get_name(), pattern)
        return starved[task.number]

    return pick


def task_of(handle: asyncio.Handle) -> SimTask | None:
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if type(owner) is SimTask else None
