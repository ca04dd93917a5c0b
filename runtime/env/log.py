"""Structured log lines: `thing.happened` and numbers under fixed names, without blocking.

    log = get_logger("millrace.schedule")
    with bound(request_id=request.request_id):
        log.info("sequence.preempted", how="swap", num_blocks=40, num_free_blocks=pool.num_free)

A program calls `configure` once. From then on our lines and those of the standard library's `logging` and `warnings` go
to one writer thread with a bounded queue. If the pipe is full, lines are dropped and counted (`dropped`); the caller
never waits. Without `configure`, as in a library, nothing is installed: warnings and errors go to `sys.stderr`, other
lines nowhere.

A field `table` holds lines that show the other fields to a person. The console prints it below the line; JSON omits it.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from ..workers.thread_start import ThreadNotStarted, start_thread
from .log_lines import console_line, json_line, terminal_line

__all__ = ["LogSink", "Logger", "bind", "bound", "captured_logs", "configure", "dropped", "get_logger", "shutdown"]

Format = Literal["console", "json"]
EventDict = MutableMapping[str, Any]

MAX_QUEUED_LINES = 8_192
LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "exception": 40, "critical": 50, "fatal": 50}


_bound: ContextVar[Mapping[str, Any]] = ContextVar("log.bound", default={})  # noqa: B039 - replaced, never changed


class Logger:
    """Makes lines called `name`, each an event and its fields. An unconfigured process shows warnings and errors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, event: str, **values: Any) -> None:
        self._line("debug", event, values)

    def info(self, event: str, **values: Any) -> None:
        self._line("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._line("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        """`exc_info`: an exception, or True for the one being handled; the line then has its traceback."""
        self._line("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """An error, with the traceback of the exception being handled."""
        self._line("error", event, {"exc_info": True, **values})

    def critical(self, event: str, **values: Any) -> None:
        self._line("critical", event, values)

    def _line(self, level: str, event: str, values: dict[str, Any]) -> None:
        if LEVELS[level] < _Active.target.level:
            return
        line = _stamp({**_bound.get(), **values, "event": event, "level": level})
        _describe_error(line)
        line["logger"] = self.name
        _Active.target.take(line)


def get_logger(name: str) -> Logger:
    """A logger called `name`. May be made at import time: it follows every later `configure`."""
    return Logger(name)


def bind(**values: Any) -> None:
    """Adds `values` to each later line of this context (task or thread)."""
    _bound.set({**_bound.get(), **values})


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Adds `values` to each line of this context within the block."""
    before = _bound.get()
    bind(**values)
    try:
        yield
    finally:
        others = {key: value for key, value in _bound.get().items() if key not in values}
        _bound.set({**others, **{key: before[key] for key in values if key in before}})


def configure(
    format: Format = "console",
    level: str = "info",
    *,
    fd: int | None = None,
    foreign_level: str = "warning",
    with_error_messages: bool = True,
) -> LogSink:
    """Sends all lines of this process to `fd` (None: standard error).

    Lines below `level` are not made; for other libraries' lines the limit is `foreign_level`. A second call replaces
    the first.

    Without `with_error_messages` an exception is logged by its type and stack only: its message may quote a client.
    """
    shutdown()
    foreign = _ForeignHandler(_level_number(foreign_level))
    sink = LogSink(format, _level_number(level), sys.stderr.fileno() if fd is None else fd)
    _Active.target, _Active.foreign = sink, foreign
    _Active.with_error_messages = with_error_messages
    _Active.settings = {
        "format": format,
        "level": level,
        "foreign_level": foreign_level,
        "with_error_messages": with_error_messages,
    }
    foreign.install()
    atexit.register(shutdown)
    return sink


def has_colours(fd: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether lines to `fd` are coloured: it is a terminal, and neither NO_COLOR nor TERM forbids it."""
    return os.isatty(fd) and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def settings() -> dict[str, Any] | None:
    """The arguments of the last `configure`, or None.

    For a child process that logs the same way.
    """
    return _Active.settings


def shutdown(timeout_s: float = 2.0) -> bool:
    """Writes the queued lines and ends the writer thread.

    After `timeout_s` it abandons the thread. Undoes `configure`. Returns whether every line was written.
    """
    target = _Active.target
    _Active.target = _StandardError()
    _Active.with_error_messages = True
    _Active.settings = None
    if _Active.foreign is not None:
        _Active.foreign.remove()
        _Active.foreign = None
    atexit.unregister(shutdown)
    return target.close(timeout_s) if isinstance(target, LogSink) else True


def dropped() -> int:
    """Lines dropped since `configure`: the log's reader is too slow or has left, or the disk is full."""
    return _Active.target.num_dropped if isinstance(_Active.target, LogSink) else 0


@contextmanager
def captured_logs() -> Iterator[list[dict[str, Any]]]:
    """For tests: collects the events of our loggers, of every level, instead of writing them."""
    before, capture = _Active.target, _Capture()
    _Active.target = capture
    try:
        yield capture.events
    finally:
        _Active.target = before


class LogTarget(Protocol):
    """Where events go."""

    level: int  # the lowest level taken

    def take(self, event: EventDict) -> None: ...


class LogSink:
    """A bounded queue of lines and the thread that writes them.

    It writes to its own duplicate of the file descriptor: if the original is closed and its number reused, lines do not
    go to the new file.
    """

    def __init__(self, format: Format, level: int, fd: int, max_queued_lines: int = MAX_QUEUED_LINES) -> None:
        if format not in ("console", "json"):
            raise ValueError(f"log format {format!r} is unknown: use console or json")
        self.level = level
        self.num_dropped = 0
        self._render = json_line if format == "json" else terminal_line if has_colours(fd) else console_line
        self._fd = os.dup(fd)
        self._max_queued_lines = max_queued_lines
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()  # of num_dropped
        self._thread = threading.Thread(target=self._write_lines, name="millrace-log", daemon=True)
        try:
            start_thread(self._thread)
        except ThreadNotStarted:
            os.close(self._fd)
            raise

    def take(self, event: EventDict) -> None:
        """Queues a line, or counts it as dropped. Never blocks."""
        if self._lines.qsize() >= self._max_queued_lines:
            self._count_dropped()
        else:
            self._lines.put(self._render(event))

    def close(self, timeout_s: float) -> bool:
        """Ends the thread. Returns whether all lines were written within `timeout_s`."""
        self._lines.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _count_dropped(self) -> None:
        with self._lock:
            self.num_dropped += 1

    def _write_lines(self) -> None:
        num_reported = 0
        while (line := self._lines.get()) is not None:
            if not self._write(line):
                self._count_dropped()
            if self.num_dropped > num_reported:
                num_reported = self.num_dropped
                event = {"event": "log.lines_dropped", "level": "warning", "logger": __name__}
                self._write(self._render(_stamp(event | {"num_dropped": num_reported})))
        os.close(self._fd)

    def _write(self, line: bytes) -> bool:
        """Returns whether the line was written."""
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # the descriptor was made non-blocking; this thread may wait
                select.select([], [self._fd], [])
            except OSError:  # the reader is gone, or the disk is full
                return False
        return True


class _Active:
    """What `configure` set up. Per process, as standard error is."""

    target: LogTarget
    foreign: _ForeignHandler | None = None
    with_error_messages = True
    settings: dict[str, Any] | None = None


class _StandardError:
    """The target before `configure`: warnings and errors to standard error."""

    level = logging.WARNING

    def take(self, event: EventDict) -> None:
        stream = sys.stderr
        if stream is not None:
            stream.write(console_line(event).decode())


class _Capture:
    level = logging.NOTSET

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def take(self, event: EventDict) -> None:
        self.events.append({key: value for key, value in event.items() if key != "timestamp"})


_Active.target = _StandardError()


class _ForeignHandler(logging.Handler):
    """Turns lines of the standard library's `logging` and `warnings` into ours."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._level_before = logging.root.level

    def install(self) -> None:
        logging.root.addHandler(self)
        logging.root.setLevel(self.level)
        logging.captureWarnings(True)

    def remove(self) -> None:
        logging.captureWarnings(False)
        logging.root.setLevel(self._level_before)
        logging.root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event: EventDict = {"event": record.getMessage(), "logger": record.name, "level": record.levelname.lower()}
        except Exception as error:  # the format string does not fit its arguments
            event = {"event": str(record.msg), "logger": record.name, "level": "error", "format_error": repr(error)}
        exception = record.exc_info[1] if record.exc_info else None
        if exception is not None:
            event["exception"] = _traceback(exception)
            if not _Active.with_error_messages:  # asyncio, for one, quotes the exception in its message too
                event["event"] = str(event["event"]).replace(repr(exception), type(exception).__name__)
        _Active.target.take(_stamp({**_bound.get(), **event}))


def _describe_error(line: EventDict) -> None:
    """Replaces `exc_info` by the field `exception`. True means the exception being handled."""
    error = line.pop("exc_info", None)
    if error is not None and not isinstance(error, BaseException):
        error = sys.exc_info()[1] if error else None
    if error is not None:
        line["exception"] = _traceback(error)


def _traceback(error: BaseException) -> str:
    """The traceback as Python prints it; without `with_error_messages`, exception types only.

    Column marks are left out, as Python compiles each source line to place them.
    """
    if _Active.with_error_messages:
        printed = traceback.TracebackException.from_exception(error, compact=True)
        _forget_places(printed)
        return "".join(printed.format()).rstrip("\n")
    parts: list[str] = []
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        frames = "".join(_lines(traceback.extract_tb(cause.__traceback__)).format())
        parts.insert(0, f"Traceback (most recent call last):\n{frames}{type(cause).__qualname__} (message withheld)")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n\n".join(parts)


def _forget_places(printed: traceback.TracebackException) -> None:
    """Removes column positions from this exception and its causes."""
    printed.stack = _lines(printed.stack)
    for other in (printed.__cause__, printed.__context__, *(printed.exceptions or ())):
        if other is not None:
            _forget_places(other)


def _lines(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The same frames, with line numbers and no columns."""
    return traceback.StackSummary.from_list([(at.filename, at.lineno or 0, at.name, at.line) for at in stack])


def _stamp(line: EventDict) -> EventDict:
    """Adds the time to a line."""
    line["timestamp"] = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return line


def _level_number(level: str) -> int:
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is unknown: use debug, info, warning, error or critical")
    return LEVELS[level]
