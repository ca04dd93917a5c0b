"""What must be true of every refusal: its shape, no leak of internals, and an answer at once with the loop free."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.deploy.running import ROOT, Answer, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "key-canary-7f3a"
ADMIN_KEY = "admin-canary-9e02"
CANARIES = (
    "prompt-canary-51c9",
    KEY,
    ADMIN_KEY,
)  # planted in prompts and keys; they may appear in no other client's answer
CONTEXT, VOCABULARY = 512, 260  # of the scripted model

REFUSED_S = 0.1
LONG_BODY_S = 2.0  # for mebibytes, which are sent and read first; the loop is as free as ever
LAG_MS = 50.0
ATTEMPTS = 20  # another process may have the core for a moment; a slow or blocking server is slow each time

_LEAKS = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|/usr/|/home/|/tmp/|\b0x[0-9a-fA-F]{6,}|Exception|Error:|line \d+, in "
)

Ask = Callable[[], Answer]


def refused(
    server: RunningServer,
    ask: Ask,
    status: int | tuple[int, ...] = 400,
    *,
    param: str | None | type[Any] = Any,
    code: str | None = None,
    budget_s: float = REFUSED_S,
) -> Answer:
    """Asks until it was refused fast enough, and checks each answer. `param` is left open unless given."""
    timings = []
    for _ in range(ATTEMPTS):
        server.stats()
        answer = ask()
        lag_ms = server.stats()["lag_ms"]
        check_error(answer, status)
        if param is not Any:
            assert base(answer.error["param"]) == param, answer.error
        if code is not None:
            assert answer.error["code"] == code, answer.error
        timings.append((round(answer.seconds, 4), round(lag_ms, 1)))
        if answer.seconds <= budget_s and lag_ms <= LAG_MS:
            return answer
    raise AssertionError(f"never within {budget_s} s and {LAG_MS} ms of lag: (seconds, lag_ms) = {timings}")


def check_error(answer: Answer, status: int | tuple[int, ...]) -> None:
    """The shape of one answer, and that it leaks nothing."""
    statuses = (status,) if isinstance(status, int) else status
    assert answer.status in statuses, (answer.status, answer.body[:500])
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.error
    assert set(answer.json) == {"error"} and set(error) - {"details"} == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 512
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    check_no_leak(answer)


def check_no_leak(answer: Answer) -> None:
    """Nothing internal is in the text: no path, no traceback, no key."""
    told = answer.body.decode("utf-8", "replace") + json.dumps(answer.headers)
    assert not _LEAKS.search(told), _LEAKS.search(told)
    for secret in (*CANARIES, str(ROOT), str(Path.home()), socket.gethostname()):
        assert secret not in told, f"{secret} leaked"


def base(param: str | None) -> str | None:
    """A field without its place: messages of messages[0].content."""
    return None if param is None else re.split(r"[\[.]", param)[0]


def asks(fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The same fields on every route that takes them: chat and completions, streamed or not, one prompt or several."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = []
    for stream in ({}, {"stream": True}):
        bodies.append((CHAT, chat | stream | fields))
        bodies.append((TEXT, {"prompt": "hi"} | stream | fields))
        bodies.append((TEXT, {"prompt": ["hi", "you"]} | stream | fields))
    return bodies


def refused_everywhere(server: RunningServer, fields: Mapping[str, Any], **expected: Any) -> None:
    """Each of `asks` is refused as expected."""
    for path, body in asks(fields):
        refused(server, lambda path=path, body=body: server.post(path, body), **expected)


def literal(body: Mapping[str, Any], field: str, text: str) -> bytes:
    """A body whose `field` is written as `text`, be it JSON or not."""
    rest = json.dumps(body)
    return (rest[:-1] + (", " if body else "") + json.dumps(field) + ": " + text + "}").encode("utf-8", "surrogatepass")
