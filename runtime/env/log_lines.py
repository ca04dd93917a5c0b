"""The form of a log line: JSON for a collector, or text for a console.

Values cannot break a line: control characters, ANSI sequences and line separators are escaped, and a line is cut to
MAX_LINE_BYTES (a JSON line stays valid JSON).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 4_096  # including the newline
FIRST_KEYS = ("timestamp", "level", "event", "logger", "stage", "request_id")

# Control characters, line separators, marks that reverse the reading direction, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_KEY = re.compile(r" ([A-Za-z_][\w.]*)=")
ERASE, RESET, BOLD, DIM = "\r\x1b[K", "\x1b[0m", "\x1b[1m", "\x1b[2m"
COLOURS = {  # of a level
    "debug": "\x1b[34m",
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "critical": "\x1b[1;31m",
}
_PLAIN = re.compile(r"[^\s\"=\\]+")


def json_line(event: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline, at most MAX_LINE_BYTES."""
    fields = _in_order(event)
    _take_table(fields)
    line = _dump(fields)
    for num_chars in (1_024, 256, 64):
        if len(line) < MAX_LINE_BYTES:
            break
        fields = {key: _shortened(key, value, num_chars) for key, value in fields.items()}
        line = _dump(fields | {"is_cut": True})
    if len(line) >= MAX_LINE_BYTES:
        kept = {key[:64]: value for key, value in fields.items() if key in FIRST_KEYS}
        line = _dump(kept | {"is_cut": True})
    return line + b"\n"


def console_line(event: Mapping[str, Any]) -> bytes:
    """`time level event key=value ...`, at most MAX_LINE_BYTES.

    A table and a traceback follow on lines that begin with `  | `; a table replaces the fields.
    """
    fields = _in_order(event)
    exception, table = str(fields.pop("exception", "")), _take_table(fields)
    if table:
        fields = {key: fields[key] for key in FIRST_KEYS if key in fields}
    head = [str(fields.pop(key, "")) for key in ("timestamp", "level", "event")]
    text = f"{head[0]} {head[1]:<8} {_escaped(head[2])}"
    text += "".join(f" {_escaped(key)}={_console_value(value)}" for key, value in fields.items())
    below = table + (re.split(r"\r\n|[\r\n]", exception) if exception else [])
    stack = "".join(f"\n  | {_escaped(line)}" for line in below)
    line, tail = text.encode(), stack.encode()
    if len(line) + len(tail) >= MAX_LINE_BYTES:
        line = _cut(line, MAX_LINE_BYTES // 2 if tail else MAX_LINE_BYTES - 1)
        num_left = MAX_LINE_BYTES - len(line) - len(b"\n  | ...\n")
        tail = b"\n  | ..." + tail[-num_left:].decode(errors="ignore").encode() if tail else b""  # keep the end
    return line + tail + b"\n"


def terminal_line(event: Mapping[str, Any]) -> bytes:
    """As `console_line`, in colours; what stands in the terminal's line, as a progress bar, is erased first."""
    line = console_line(event).decode()
    stamp, level = str(event.get("timestamp", "")), str(event.get("level", ""))
    head = f"{stamp} {level:<8} "
    if not line.startswith(head):
        return line.encode()
    first, newline, below = line[len(head) :].partition("\n")
    name = _escaped(event.get("event", ""))
    name = name if first.startswith(name) else first
    fields = _KEY.sub(rf" {DIM}\1={RESET}", first[len(name) :])
    colour = COLOURS.get(level, RESET)
    text = f"{ERASE}{DIM}{stamp}{RESET} {colour}{level:<8}{RESET} {BOLD}{name}{RESET}{fields}"
    return (text + newline + below).encode()


def _take_table(fields: dict[str, Any]) -> list[str]:
    """Takes the lines of a table out of the fields. A `table` that is not a list stays a field."""
    return fields.pop("table") if isinstance(fields.get("table"), list) else []


def _in_order(event: Mapping[str, Any]) -> dict[str, Any]:
    ordered = {key: event[key] for key in FIRST_KEYS if key in event} | dict(event)
    for key, value in ordered.items():
        if isinstance(value, str) and len(value) > MAX_LINE_BYTES:
            ordered[key] = _shortened(key, value, MAX_LINE_BYTES)
    return ordered


def _escaped(text: object) -> str:
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", _text(text))


def _dump(value: object) -> bytes:
    """JSON with unsafe characters escaped.

    Values that orjson rejects (surrogates, ints over 64 bits) become text.
    """
    try:
        line = _strict_dump(value)
    except TypeError:
        fields = value if isinstance(value, Mapping) else {"value": value}
        accepted = {_escaped(key): _escaped(item) if _is_refused(item) else item for key, item in fields.items()}
        line = _strict_dump(accepted)
    return _escaped(line.decode()).encode()


def _strict_dump(value: object) -> bytes:
    import orjson  # with the first line, as steps on a GPU run without it

    return orjson.dumps(value, default=_text, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _is_refused(value: object) -> bool:
    try:
        _strict_dump(value)
    except TypeError:
        return True
    return False


def _console_value(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and not _UNSAFE.search(value) else _quoted(value)
    return str(value) if isinstance(value, int | float) else _dump(value).decode()


def _quoted(text: str) -> str:
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}, of which str() raised {type(error).__name__}>"


def _shortened(key: str, value: object, num_chars: int) -> object:
    """At most `num_chars` characters: a traceback's last ones, any other value's first ones."""
    text = value if isinstance(value, str) else _dump(value).decode()
    if len(text) <= num_chars:
        return value
    return "..." + text[-num_chars:] if key == "exception" else text[:num_chars] + "..."


def _cut(line: bytes, num_bytes: int) -> bytes:
    if len(line) <= num_bytes:
        return line
    return line[: num_bytes - len(b" ...")].decode(errors="ignore").encode() + b" ..."
