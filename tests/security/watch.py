"""Checks of a server around each test: its memory is bounded, nothing in it breaks, and it does nothing forbidden.

The messages begin with the check that failed: `memory`, `breakage` or `forbidden`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from tests.deploy.running import RunningServer
from tests.security.oracle import CHAT, TEXT

MIB = 2**20
PEAK_MIB = 32.0  # above what was there before
LEFT_MIB = 4.0
PATIENCE_S = 30.0  # until what a closed connection held is given up

LARGE: list[dict[str, object]] = [{"prompt": list(range(260_000))}, {"prompt": "a " * (2 * MIB - 64)}]
GRAMMAR = {"structured_outputs": {"regex": "[a-z]"}}
WARM_UP: list[tuple[str, dict[str, object]]] = [
    (TEXT, {"prompt": "a", "max_tokens": 2}),
    (TEXT, {"prompt": "a", "max_tokens": 2, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/embeddings", {"input": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [97]}),
]


# The most that a server kept between two tests: allocators give pages back and take them again, by some MiB.
_at_rest: WeakKeyDictionary[RunningServer, float] = WeakKeyDictionary()


@contextmanager
def watched(
    server: RunningServer, headers: Mapping[str, str] | None = None, *, fully: bool = False, **limits: float
) -> Iterator[RunningServer]:
    """A server of one test, which was started with `audit`: warm, then watched within the block."""
    warm_up(server, headers, fully=fully)
    watch = Watch(server, **limits)
    yield server
    watch.check()


def warm_up(server: RunningServer, headers: Mapping[str, str] | None = None, *, fully: bool = False) -> None:
    """What is loaded when it is first needed is loaded now; from now on nothing forbidden may happen. `fully`: grammars
    and the document
    too, which take longest."""
    long = b'{"prompt": "a", "max_tokens": 2}'.ljust(4 * MIB)  # orjson keeps the 8 MiB in which it reads such a body
    bodies = [*WARM_UP, (TEXT, long), *([(TEXT, WARM_UP[0][1] | GRAMMAR)] if fully else [])]
    for path, body in bodies:
        answer = server.post(path, body, headers)
        assert answer.status == 200, (path, answer.body)
    for body in LARGE:  # refused; what they are read into stays with the interpreter, for the next
        server.post(TEXT, body, headers)
    for path in ("/metrics", "/server_info", "/nope", *(("/openapi.json", "/docs") if fully else ())):
        server.get(path, headers)
    server.get("/nope", headers, "CONNECT")  # loads a codec of host names
    server.ask("collect")
    server.ask("arm")


class Memory:
    """Resident, of one process, in MiB, as Linux counts it."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    @property
    def now(self) -> float:
        return self._read("VmRSS")

    @property
    def kept(self) -> float:
        """Without what is shared, as the rings of the trace are, which are resident as far as they are written."""
        return self._read("RssAnon")

    @property
    def peak(self) -> float:
        """Since the process began, or since `forget_peak`."""
        return self._read("VmHWM")

    def forget_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def _read(self, name: str) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Watch:
    """One server, from when this is made until `check`. The limits are for a test that says why it may take more."""

    def __init__(self, server: RunningServer, peak_mib: float = PEAK_MIB, left_mib: float = LEFT_MIB) -> None:
        self._server = server
        self._peak_mib = peak_mib
        self._left_mib = left_mib
        self._memory = Memory(server.process.pid)
        self._before = self._memory.now
        self._kept_before = _at_rest[server] = max(_at_rest.get(server, 0.0), self._memory.kept)
        self._memory.forget_peak()

    def check(self) -> None:
        """Raises AssertionError for what should not have been."""
        audited = self._server.ask("audit")
        assert not audited["seen"], f"forbidden: the server did what no request may cause: {audited['seen']}"
        assert audited["is_ready"] and not audited["num_restarts"], f"breakage: {audited}"
        grown = self._memory.peak - self._before
        assert grown <= self._peak_mib, f"memory: {grown:.1f} MiB more at the peak: at most {self._peak_mib:g}"
        left = self._left()
        assert left <= self._left_mib, f"memory: {left:.1f} MiB more are left: at most {self._left_mib:g}"

    def _left(self) -> float:
        deadline = time.monotonic() + PATIENCE_S
        while (left := self._memory.kept - self._kept_before) > self._left_mib and time.monotonic() < deadline:
            self._server.ask("collect")
            time.sleep(0.02)
        return left
