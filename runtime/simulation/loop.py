"""An event loop with virtual time.

A policy and a seed choose which of the ready callbacks runs next.

It handles callbacks, timers and tasks, and detects deadlock and livelock. `env.py` adds workers and faults.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NoReturn, TypeVarTuple

from ..env.env import seeded_stream
from .policies import SimTask, policy_of

Ts = TypeVarTuple("Ts")

START_S = 1_000.0  # virtual time at the start: far from 0, so that a forgotten timestamp shows
MAX_CALLBACKS = 1_000_000


class SimError(Exception):
    """A failure that only a simulation can detect."""


class Deadlock(SimError):
    """No callback is ready, no timer is set, and the main coroutine has not ended."""


class Livelock(SimError):
    """The run exceeded its limit of callbacks."""


class LoopErrors(SimError):
    """The main coroutine ended, but these errors were never handled (invariant I8)."""


class _Handle(asyncio.Handle):
    """asyncio's handle, made faster. The base's methods read `_source_traceback` and `_repr`."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class SimLoop(asyncio.BaseEventLoop):
    """An event loop with its own time and order of callbacks.

    No selector, no threads, no debug mode.
    """

    _ready: list[Any]  # of Handle; a list instead of the base's deque, as taking from anywhere must be cheap
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(
        self, seed: int, policy: str = "uniform", max_callbacks: int = MAX_CALLBACKS, keep_trace: bool = False
    ) -> None:
        super().__init__()
        self.set_debug(False)
        self._ready = []
        self._now = START_S
        self._home_thread = threading.get_ident()
        self._tasks: list[SimTask] = []
        self._num_tasks = 0
        self._priorities = seeded_stream(seed, "loop/priority")
        self._pick = policy_of(policy, seeded_stream(seed, "loop/policy"))
        self.max_callbacks = max_callbacks
        self.num_callbacks = 0
        self.errors: list[str] = []  # reported to the exception handler, or never retrieved
        self._first_error: BaseException | None = None
        self._events: list[str] = []  # not hashed yet
        self._hash = hashlib.sha256()
        self._kept: list[str] | None = [] if keep_trace else None
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._collect)

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._home_thread:
            raise SimError("a real thread called into a simulated loop: start threads through the Env only")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when <= self._now:
            self._ready.append(timer)
        else:
            heapq.heappush(self._scheduled, timer)
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise SimError("run_in_executor would start real threads: use env.run_in_thread or env.worker")

    def note(self, text: str) -> None:
        """Adds an event to the trace."""
        self._events.append(text)

    def trace_hash(self) -> str:
        """SHA-256 of the trace so far."""
        self._hash_events()
        return self._hash.hexdigest()

    @property
    def trace(self) -> tuple[str, ...]:
        self._hash_events()
        return tuple(self._kept or ())

    def stand_still(self, seconds: float) -> None:
        """Lets time pass in which nothing runs, as on a machine that is suspended: what was due meanwhile is late."""
        self._now += seconds
        self._events.append(f"@{self._now!r}")
        self._take_due()

    def unwind(self) -> tuple[str, ...]:
        """Cancels the remaining tasks and lets them end. Returns where they were waiting."""
        leaked = [task for task in self._tasks if not task.done()]
        places = tuple(_place(task) for task in leaked)
        for task in leaked:
            task.cancel()
        if leaked:
            self.run_until_complete(asyncio.wait(leaked))
        self.run_until_complete(self.shutdown_asyncgens())
        return places

    def abandon(self) -> None:
        """Ends a failed run as well as possible. Errors are dropped: they would hide the first one."""
        self.max_callbacks = self.num_callbacks + 100_000
        try:
            self.unwind()
        except Exception:
            for task in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]

    def check_errors(self) -> None:
        """Raises `LoopErrors` if an error of this run was never handled."""
        gc.collect(0)  # objects of the run are in the youngest generation, as the collector was off
        for task in self._tasks:
            self._check_retrieved(task)
        if self.errors:
            raise LoopErrors("\n".join(self.errors)) from self._first_error

    def _run_once(self) -> None:
        """Called by the base's `run_forever`.

        Runs until nothing is ready, then moves the clock to the next timer.
        """
        ready, pick, events = self._ready, self._pick, self._events
        if not ready:
            self._advance()
        while ready and not self._stopping:
            handle = pick(ready)
            if handle._cancelled:
                continue
            self.num_callbacks += 1
            callback = handle._callback
            owner = getattr(callback, "__self__", None)
            events.append(owner.label if type(owner) is SimTask else _label(handle))
            if len(events) >= 4_096:
                self._check_livelock()
                self._hash_events()
            try:
                handle._context.run(callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"exception in callback {_label(handle)}", "exception": error})

    def _advance(self) -> None:
        timers = self._scheduled
        if self._timer_cancelled_count > 100 and self._timer_cancelled_count * 2 > len(timers):
            timers[:] = [timer for timer in timers if not timer._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1
        if not timers:
            waiting = "\n".join(f"  {_place(task)}" for task in self._tasks if not task.done())
            raise Deadlock(f"no callback is ready and no timer is set, but these tasks wait:\n{waiting}")
        self._now = timers[0].when()
        self._events.append(f"@{self._now!r}")
        self._take_due()

    def _take_due(self) -> None:
        timers = self._scheduled
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _check_livelock(self) -> None:
        if self.num_callbacks > self.max_callbacks:
            busiest = ", ".join(name for name, _ in Counter(self._events[-1_000:]).most_common(5))
            raise Livelock(
                f"{self.num_callbacks} callbacks and no end (max_callbacks = {self.max_callbacks}); virtual time is "
                f"{self._now - START_S:.6f} s; busiest of late: {busiest}"
            )

    def _make_task(self, _loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> SimTask:
        self._num_tasks += 1
        if len(self._tasks) >= 10_000:
            self._forget_ended_tasks()
        task = SimTask(coro, number=self._num_tasks, priority=self._priorities.random(), loop=self, **kwargs)
        task.set_name(kwargs.get("name") or f"task-{task.number}")  # asyncio counts names over all loops of the process
        self._tasks.append(task)
        return task

    def _forget_ended_tasks(self) -> None:
        for task in self._tasks:
            if task.done():
                self._check_retrieved(task)
        self._tasks = [task for task in self._tasks if not task.done()]

    def _check_retrieved(self, task: SimTask) -> None:
        if getattr(task, "_log_traceback", False):
            error = task.exception()
            message = f"exception of task {task.get_name()!r} was never retrieved"
            self._collect(self, {"message": message, "exception": error})

    def _collect(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._first_error = self._first_error or error
        self.errors.append(context["message"] + (f": {error!r}" if error is not None else ""))

    def _hash_events(self) -> None:
        if self._events:
            self._hash.update("\n".join([*self._events, ""]).encode(errors="backslashreplace"))
            if self._kept is not None:
                self._kept.extend(self._events)
            self._events.clear()

    def __del__(self) -> None:
        """Does nothing: the loop holds no resources, so an unclosed one needs no ResourceWarning."""


def _label(handle: asyncio.Handle) -> str:
    """A callback's name in the trace: that of its task, or of the function."""
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if type(owner) is SimTask:
        return owner.label
    while not hasattr(callback, "__qualname__") and hasattr(callback, "func"):
        callback = callback.func
    return getattr(callback, "__qualname__", None) or type(callback).__qualname__


def _place(task: SimTask) -> str:
    """`name waits at file:line in function`, innermost first, for each coroutine of the task."""
    frames = list(_suspended_frames(task.get_coro()))
    stack = " < ".join(f"{code.co_filename}:{line} in {code.co_qualname}" for code, line in reversed(frames))
    return f"{task.get_name()} waits at {stack or 'its start'}"


def _suspended_frames(awaitable: Any) -> Iterator[tuple[CodeType, int]]:
    for _ in range(100):
        prefix = next((p for p in ("cr", "gi", "ag") if hasattr(awaitable, f"{p}_frame")), None)
        frame = getattr(awaitable, f"{prefix}_frame", None)
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        awaitable = getattr(awaitable, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await", None)
