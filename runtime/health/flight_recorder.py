"""The flight recorder: saves what led to a stall or crash to a file.

A file of JSON lines, each with a `type`: `flight` (reason, time), `stage`, `edge` (with its queued items, by kind and
id), `request`, `thread` and `task` (stacks: files, lines and functions), and `event`, the trace of the last seconds.
It never holds prompts, texts, tokens or keys: values of variables are not read.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from ..pipeline import Pipeline
from ..pipeline_status import PipelineStatus
from ..trace.tracer import RingReader, as_dicts, in_order_of_time

MAX_FILES = 8  # in the directory; the oldest is deleted
MAX_EVENTS = 50_000  # the latest; about 7 MB
MAX_ITEMS = 64  # listed per edge
MAX_REQUESTS = 1_024
MAX_TASKS = 1_024
MAX_FRAMES = 32  # of a stack, the innermost
PAUSE_S = 10.0  # between two files for the same reason, so that repeated crashes do not fill the disk
# of a queued item
ITEM_ID_FIELDS = ("request_id", "step", "generation", "sequence_id", "first_sequence_id", "prompt_index")
Line = dict[str, Any]


class FlightRecorder:
    """Writes `flight-<time>-<reason>.jsonl` files into `directory`.

    At most MAX_FILES, of `last_s` seconds each.
    """

    def __init__(self, directory: Path, last_s: float = 30.0) -> None:
        self.directory = directory
        self.last_s = last_s
        self._begun_s: dict[str, float] = {}  # by reason

    def begin(self, reason: str, pipeline: Pipeline | None, **details: Any) -> Callable[[], Path] | None:
        """Collects the state that changes, on the pipeline's loop, in milliseconds.

        The returned function writes the file, in any thread; it returns the path, or raises OSError. `reason` is a
        word; `details` go into the first line. Returns None if a file for this reason was begun less than PAUSE_S ago.
        """
        now_s = time.monotonic()
        if now_s - self._begun_s.get(reason, -PAUSE_S) < PAUSE_S:
            return None
        self._begun_s[reason] = now_s
        moment = datetime.now(UTC)
        first = {"type": "flight", "reason": reason, "time": moment.isoformat(), "pid": os.getpid()} | details
        lines = [first, *_state(pipeline), *thread_stacks()]
        path = self.directory / f"flight-{moment:%Y%m%dT%H%M%S.%fZ}-{reason}.jsonl"
        return partial(self._write, path, lines, pipeline)

    def write(self, reason: str, pipeline: Pipeline | None, **details: Any) -> Path | None:
        """`begin` and the writing, in one call: a second or two for a full trace."""
        go_on = self.begin(reason, pipeline, **details)
        return None if go_on is None else go_on()

    def _write(self, path: Path, lines: Iterable[Line], pipeline: Pipeline | None) -> Path:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for line in chain(lines, () if pipeline is None else self._events(pipeline)):
                file.write(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE))
        for old in sorted(self.directory.glob("flight-*.jsonl"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return path

    def _events(self, pipeline: Pipeline) -> Iterator[Line]:
        readers: list[RingReader] = pipeline.tracer.readers()
        if not readers:
            return
        records = in_order_of_time(reader.read_since()[0] for reader in readers)
        since_ns = max(0, pipeline.env.now_ns() - int(self.last_s * 1e9))
        records = records[records["time_ns"] >= since_ns][-MAX_EVENTS:]
        for event in as_dicts(records, readers[0].names()):
            yield {"type": "event"} | event


def _state(pipeline: Pipeline | None) -> Iterator[Line]:
    if pipeline is not None:
        status = pipeline.status()
        yield from _stages(status, pipeline.env.now())
        yield from _edges(status, pipeline)
        yield from _requests(pipeline)
        yield from task_stacks(pipeline)
        yield from pipeline.stacks_elsewhere


def _stages(status: PipelineStatus, now: float) -> Iterator[Line]:
    for name, stage in status.stages.items():
        yield {
            "type": "stage",
            "stage": name,
            "is_busy": stage.is_busy,
            "since_progress_s": round(now - stage.last_progress_s, 3),
            "blocked_on": stage.blocked_on,
            "num_restarts": stage.num_restarts,
            "idle_s": round(stage.idle, 3),
            "busy_s": round(stage.busy, 3),
            "blocked_s": round(stage.blocked, 3),
        }


def _edges(status: PipelineStatus, pipeline: Pipeline) -> Iterator[Line]:
    for name, channel in status.channels.items():
        stats, here = channel.stats, pipeline.channels.get(name)
        yield {
            "type": "edge",
            "edge": name,
            "depth": stats.depth,
            "capacity": stats.capacity,
            "high_water": stats.high_water,
            "num_sent": stats.num_sent,
            "num_senders_waiting": channel.num_waiting,
            "items": [] if here is None else [_item(item) for item in here.peek(MAX_ITEMS)],
        }


def _item(item: object) -> Line:
    """A message's type and ids, without its content.

    Reading it may raise: it may be the item that broke the stage.
    """
    line: Line = {"kind": type(item).__name__}
    with suppress(Exception):
        line |= {
            name: getattr(item, name) for name in ITEM_ID_FIELDS if isinstance(getattr(item, name, None), (str, int))
        }
    return line


def _requests(pipeline: Pipeline) -> Iterator[Line]:
    live: Mapping[str, Any] = {} if pipeline.exit is None else pipeline.exit.live
    for request_id, outbox in list(live.items())[:MAX_REQUESTS]:
        counts = {name: getattr(outbox, name, None) for name in ("num_prompt_tokens", "num_generated_tokens")}
        arrival_s = getattr(getattr(outbox, "times", None), "arrival_s", None)
        age_s = None if arrival_s is None else round(pipeline.env.now() - arrival_s, 3)
        yield {"type": "request", "request_id": request_id, "age_s": age_s} | counts


def thread_stacks() -> Iterator[Line]:
    """The stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield {"type": "thread", "thread": names.get(ident, str(ident)), "stack": _stack(frame)}


def task_stacks(pipeline: Pipeline, only: Container[str] | None = None) -> Iterator[Line]:
    """Where each task of the pipeline's loop waits, or those named in `only`.

    Callable from any thread.
    """
    tasks: Iterable[asyncio.Task[Any]] = () if pipeline.loop is None else asyncio.all_tasks(pipeline.loop)
    tasks = tasks if only is None else [task for task in tasks if task.get_name() in only]
    for task in sorted(tasks, key=asyncio.Task.get_name)[:MAX_TASKS]:
        yield {"type": "task", "task": task.get_name(), "stack": _awaited(task)}


def _awaited(task: asyncio.Task[Any]) -> list[str]:
    """Where a task waits: its coroutine, what that awaits, and so on inwards."""
    places: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None and len(places) < MAX_FRAMES:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        frame = frame or getattr(waiting, "ag_frame", None)
        if frame is None:
            break
        places.append(_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return places


def _stack(frame: FrameType) -> list[str]:
    """The frames, outermost first."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    return [_place(entry.filename, entry.lineno, entry.name) for entry in reversed(summary)]


def stack_of(error: BaseException) -> list[str]:
    """The stack of an exception, outermost first, without its message, which may quote a client.

    An exception from another process carries its stack in `stack_elsewhere`.
    """
    if elsewhere := getattr(error, "stack_elsewhere", None):
        return list(elsewhere)
    summary = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    return [_place(entry.filename, entry.lineno, entry.name) for entry in summary[-MAX_FRAMES:]]


def _place(filename: str, line: int | None, name: str) -> str:
    return f"{filename}:{line} {name}"
