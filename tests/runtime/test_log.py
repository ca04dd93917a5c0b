"""Log lines: one line each whatever they hold, never blocking, nothing installed by default."""

import fcntl
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runtime.env import log
from millrace.runtime.env.log import LogSink, captured_logs, get_logger
from millrace.runtime.env.log_lines import MAX_LINE_BYTES, console_line, json_line, terminal_line

logger = get_logger("millrace.test")
FORGERIES = ("\n2026-01-01 forged", "\r\nforged", "\x1b[2J", "\x9b31m", "\u2028next", "\u202edesrever", "\x7f", "\0")


@pytest.fixture
def lines_of() -> Iterator[Callable[[str], list[str]]]:
    """Configures the log into a pipe; called, it ends the log and gives its lines."""
    reading, writing = os.pipe()

    def start(*args: str, **options: str) -> None:
        log.configure(*args, fd=writing, **options)  # type: ignore[arg-type]

    def lines(*_: str) -> list[str]:
        assert log.shutdown()
        os.close(writing)
        with open(reading, closefd=False) as pipe:
            return pipe.read().splitlines()

    lines.start = start  # type: ignore[attr-defined]
    yield lines
    log.shutdown()
    os.close(reading)


def test_json_lines_hold_the_fields_with_the_bound_request_and_stage(lines_of):
    lines_of.start("json")
    with log.bound(request_id="r1", stage="schedule"):
        logger.info("sequence.preempted", how="swap", num_blocks=np.int64(4), share=0.5)
    logger.debug("not.wanted")
    (line,) = map(json.loads, lines_of())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        **{"level": "info", "event": "sequence.preempted", "logger": "millrace.test", "stage": "schedule"},
        **{"request_id": "r1", "how": "swap", "num_blocks": 4, "share": 0.5},
    }


def test_console_lines_quote_what_would_be_ambiguous(lines_of):
    lines_of.start("console", "debug")
    logger.debug("thing.happened", plain="abc", spaced="a b", quoted='say "x"', pair="a=b", items=[1, "b"], none=None)
    (line,) = lines_of()
    assert line.split(" ", 1)[1] == (
        "debug    thing.happened logger=millrace.test plain=abc "
        r'spaced="a b" quoted="say \"x\"" pair="a=b" items=[1,"b"] none=null'
    )


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical", "odd"])
@pytest.mark.parametrize("more", [{}, {"reason": "a b=c", "n": 1}, {"exception": "E: x\ny"}, {"table": ["a  b"]}])
def test_a_terminals_line_is_the_console_line_in_colours(level: str, more: dict[str, object]):
    event = {"timestamp": "T", "level": level, "event": "thing.happened", "logger": "millrace.x"} | more
    line = terminal_line(event).decode()
    assert re.sub("\\r|\x1b\\[[0-9;]*[mK]", "", line) == console_line(event).decode()
    assert line.startswith("\r\x1b[K") and "\x1b[1mthing.happened\x1b[0m" in line


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_gets_colours_unless_a_variable_forbids_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_coloured: bool
):
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    controller, terminal = pty.openpty()
    try:
        log.configure("console", fd=terminal)
        logger.info("thing.happened", n=1)
        assert log.shutdown()
        assert ("\x1b[32m" in os.read(controller, 4096).decode()) is is_coloured
    finally:
        os.close(terminal)
        os.close(controller)


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("render", [json_line, console_line])
def test_no_value_key_or_event_breaks_out_of_its_line(render: Callable[[dict[str, object]], bytes], forgery: str):
    fields = {"event": forgery, "level": "info", forgery: 1, "text": forgery, "list": [forgery], "exception": forgery}
    text = render(fields).decode()
    assert text.endswith("\n") and not any(char in text[:-1].replace("\n  | ", "") for char in "\r\n")
    assert not any(char in text for char in "\x1b\x9b\u2028\u202e\x7f\0")
    if render is json_line:
        assert json.loads(text)["text"] == forgery


def test_a_table_stands_below_its_line_on_a_console_and_in_no_json_line():
    event = {"event": "memory.plan", "level": "info", "total_bytes": 3, "table": ["weights  1 B", "total\n  3 B"]}
    head, *below = console_line(event).decode().splitlines()
    assert "memory.plan" in head and "total_bytes" not in head, "the table says it"
    assert below == ["  | weights  1 B", "  | total\\u000a  3 B"]
    assert json.loads(json_line(event)) == {"event": "memory.plan", "level": "info", "total_bytes": 3}
    assert "table=3" in console_line({"event": "x", "table": 3}).decode()


def test_a_traceback_in_the_console_stays_behind_its_bar_whatever_the_exception_says(lines_of):
    lines_of.start("console")
    try:
        raise ValueError("first\n2026-01-01 critical forged\x1b[31m")
    except ValueError as error:
        logger.error("stage.crashed", exc_info=error)
    first, *rest = lines_of()
    assert " error    stage.crashed " in first and rest and all(line.startswith("  | ") for line in rest)
    assert r"  | 2026-01-01 critical forged\u001b[31m" in rest


def test_a_traceback_is_as_python_prints_it_but_for_the_marks_below_lines(lines_of):
    """With the causes of an exception, and of each in a group."""
    lines_of.start("json")
    try:
        try:
            {"a": [1]}["a"][0]["b"]
        except TypeError as inner:
            raise ExceptionGroup("both", [KeyError("c"), inner]) from inner
    except ExceptionGroup as error:
        logger.error("stage.crashed", exc_info=error)
        printed = traceback.format_exception(error)
    (line,) = map(json.loads, lines_of())
    marks = re.compile(r"[ |]*[~^]+[ ]*")
    expected = [line for line in "".join(printed).splitlines() if not marks.fullmatch(line)]
    assert line["exception"].splitlines() == expected != "".join(printed).splitlines()


TEXTS = st.text('ab é€😀\n\r\t\0\x1b\x7f\x9b\u2028\u202e\ud800\udfff"\\={}[]', max_size=40)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        TEXTS,
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=6,
    ),
    st.integers(0, 5_000),
)
def test_every_line_is_one_line_within_the_cap_and_every_json_line_parses(fields: dict[str, object], size: int):
    fields = {**fields, "event": "thing.happened", "level": "info", "long": "é" * size}
    line = json_line(fields)
    assert len(line) <= MAX_LINE_BYTES and line.count(b"\n") == 1 and json.loads(line)["event"] == "thing.happened"
    shown = console_line({key: value for key, value in fields.items() if key != "exception"})
    assert len(shown) <= MAX_LINE_BYTES and shown.count(b"\n") == 1


@pytest.mark.parametrize("num_keys", [1, 50, 300])
def test_a_line_too_long_is_cut_and_keeps_its_head_and_the_end_of_a_traceback(num_keys: int):
    fields = {"event": "a.b", "level": "error", "request_id": "r1"} | {f"k{i}": "x" * 9_000 for i in range(num_keys)}
    line = json.loads(json_line(fields))
    assert line["is_cut"] is True and (line["event"], line["request_id"]) == ("a.b", "r1")
    fields["exception"] = "\n".join(f"frame {i}" for i in range(2_000)) + "\nValueError: the end"
    shown = console_line(fields)
    assert len(shown) <= MAX_LINE_BYTES and shown.endswith(b"ValueError: the end\n") and b"  | ..." in shown
    if num_keys == 1:
        assert json.loads(json_line(fields))["exception"].endswith("ValueError: the end")


def test_a_value_whose_str_raises_is_named_not_raised():
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    for render in (json_line, console_line):
        assert b"<Hostile, of which str() raised RuntimeError>" in render({"event": "a.b", "value": Hostile()})


def test_a_full_pipe_costs_lines_and_no_time_and_the_log_says_how_many():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 65_536)
    sink = LogSink("json", logging.INFO, writing, max_queued_lines=10)
    began = time.monotonic()
    os.write(writing, b"{}\n" * 20_000)
    for i in range(2_000):
        sink.take({"event": "a.b", "level": "info", "i": i, "text": "x" * 900})
    assert time.monotonic() - began < 60.0 and sink.num_dropped > 1_900
    assert sink.close(timeout_s=0.01) is False  # the pipe has no reader
    seen = b""
    while sink._thread.is_alive():
        if select.select([reading], [], [], 0.01)[0]:  # the thread may end between the two checks
            seen += os.read(reading, 65_536)
    os.close(writing)
    with open(reading, "rb") as pipe:
        lines = [json.loads(line) for line in (seen + pipe.read()).splitlines()]
    reports = [line["num_dropped"] for line in lines if line.get("event") == "log.lines_dropped"]
    assert reports and reports[-1] == sink.num_dropped == 2_000 - sum(line.get("event") == "a.b" for line in lines)


def test_a_reader_that_has_gone_costs_lines_and_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    log.configure("json", fd=writing)
    logger.info("a.b")
    deadline = time.monotonic() + 60
    while log.dropped() < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert log.dropped() >= 1 and log.shutdown()
    os.close(writing)


def test_lines_never_reach_a_file_opened_under_the_number_of_the_log_s():
    reading, writing = os.pipe()
    sink = LogSink("json", logging.INFO, writing)
    other_reading, other = os.pipe()
    os.dup2(other, writing)  # closes the log's descriptor
    sink.take({"event": "a.b", "level": "info"})
    assert sink.close(timeout_s=60.0)
    os.close(other)
    os.close(writing)
    with open(reading, "rb") as pipe, open(other_reading, "rb") as foreign:
        assert json.loads(pipe.read())["event"] == "a.b" and foreign.read() == b""


def test_lines_of_other_libraries_and_warnings_take_the_same_way(lines_of):
    handlers, level = list(logging.root.handlers), logging.root.level
    lines_of.start("json")
    with log.bound(request_id="r1"):
        exc_info = (ValueError, ValueError("x"), None)
        logging.getLogger("aiohttp.server").error("failed %d times\nforged", 3, exc_info=exc_info)
    logging.getLogger("httpx").info("not wanted")
    assert log._Active.foreign is not None
    log._Active.foreign.handle(logging.makeLogRecord({"name": "x", "msg": "bad format %d", "args": ("text",)}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", ResourceWarning, stacklevel=1)
    first, second, third = map(json.loads, lines_of())
    assert (first["event"], first["logger"], first["level"]) == ("failed 3 times\nforged", "aiohttp.server", "error")
    assert first["request_id"] == "r1" and "ValueError: x" in first["exception"]
    assert second["event"] == "bad format %d" and "format_error" in second
    assert "ResourceWarning: old" in third["event"] and third["logger"] == "py.warnings"
    assert (logging.root.handlers, logging.root.level) == (handlers, level)


def test_unconfigured_only_warnings_and_errors_are_shown(capsys: pytest.CaptureFixture[str]):
    logger.info("not.shown")
    logger.warning("thing.odd", num=1)
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("warning  thing.odd logger=millrace.test num=1\n") and err.count("\n") == 1
    assert log.dropped() == 0


@pytest.mark.slow
def test_importing_installs_nothing_and_starts_no_thread():
    code = (
        "import logging, threading;"
        "from millrace.runtime.env.log import get_logger; get_logger('x').info('a.b');"
        "assert threading.active_count() == 1;"
        "assert logging.root.handlers == [] and logging.root.level == logging.WARNING"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_queued_lines_are_written_when_the_process_ends_without_shutdown():
    code = (
        "from millrace.runtime.env import log; log.configure('json'); logger = log.get_logger('x');"
        "[logger.info('a.b', i=i) for i in range(500)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["i"] for line in done.stderr.splitlines()] == list(range(500))


def test_a_second_configure_replaces_the_first(lines_of):
    handlers = list(logging.root.handlers)
    lines_of.start("console", "error")
    lines_of.start("json", "info")
    assert len(logging.root.handlers) == len(handlers) + 1
    logger.info("a.b")
    (line,) = lines_of()
    assert json.loads(line)["event"] == "a.b"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"format": "xml"}, "format 'xml' is unknown"), ({"level": "loud"}, "level 'loud' is unknown")],
)
def test_unknown_settings_are_refused_by_name(options: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        log.configure(**options)  # type: ignore[arg-type]
    assert log.settings() is None, "no process of ours is started with what was refused"


def test_captured_logs_are_the_events_of_the_block_and_nothing_is_written(capsys: pytest.CaptureFixture[str]):
    with captured_logs() as events:
        logger.debug("thing.happened", num=1)
        logger.error("thing.failed")
    logger.info("afterwards")
    assert events == [
        {"event": "thing.happened", "num": 1, "level": "debug", "logger": "millrace.test"},
        {"event": "thing.failed", "level": "error", "logger": "millrace.test"},
    ]
    assert capsys.readouterr().err == ""
