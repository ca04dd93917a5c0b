"""What no request may make a process do, noticed by an audit hook. For the process under test; knows no test.

Python tells a hook of each file that is opened, each connection, each process, each piece of code that is compiled or
run. What `Audit` keeps is told as `event what`: `open /etc/passwd`, `subprocess.Popen /usr/bin/python -P -m a.helper`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

FORBIDDEN = frozenset(
    {
        "pickle.find_class",
        "exec",
        "compile",
        "open",  # outside the roots
        "os.system",
        "subprocess.Popen",
        "socket.connect",
        "socket.getaddrinfo",
    }
)
HELPER_STATE = re.compile(r"/proc/\d+/stat")  # what a helper does that takes long for its job
# Memory and times of this process, for its metrics; what a child without an output gets for one.
OWN_FILES = ("/proc/self/", f"/proc/{os.getpid()}/", "/dev/null")


class Audit:
    """Once armed, keeps what is forbidden. A hook cannot be taken out again, so it has one switch.

    `roots` are folders of which files may be opened: those of the model, the log and scratch files. `allowed` are
    beginnings of what else may be, as it would be told. Sources of modules that are loaded may be read, as a traceback
    in the log quotes them.
    """

    def __init__(
        self, roots: Collection[Path] = (), allowed: Collection[str] = (), but: Collection[str] = frozenset()
    ) -> None:
        self.is_armed = False
        self._roots = tuple(f"{root.resolve()}/" for root in (*roots, Path(tempfile.gettempdir())))
        self._allowed = tuple(allowed)
        self._watched = FORBIDDEN - frozenset(but)
        self._seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Raises AssertionError at the end of the block for what was seen within."""
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False
        seen = self.take()
        assert not seen, f"forbidden: {seen}"

    def take(self) -> list[str]:
        """What was seen and is not allowed, since the last time."""
        seen, self._seen = self._seen, []
        return [told for told in seen if not self.is_allowed(told)]

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_armed and event in self._watched:
            self.see(f"{event} {_what(event, args)}")

    def see(self, told: str) -> None:
        """Of what happens; judged when it is taken, as judging opens files too."""
        self._seen.append(told)

    def is_allowed(self, told: str) -> bool:
        """Whether it is one of the exceptions."""
        event, _, what = told.partition(" ")
        if told.startswith(self._allowed):
            return True
        if event != "open":
            return False
        return what.startswith(OWN_FILES) or HELPER_STATE.fullmatch(what) is not None or self._is_inside(what)

    def _is_inside(self, path: str) -> bool:
        if not os.path.isabs(path):
            return path.isdecimal()  # a descriptor, opened before
        real = os.path.realpath(path)
        return f"{real}/".startswith(self._roots) or real in _loaded_sources()


def _what(event: str, args: tuple[Any, ...]) -> str:
    """The thing itself, in words."""
    if event == "open":
        path = args[0]
        return str(path) if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
    if event == "subprocess.Popen":
        return " ".join(map(os.fsdecode, args[1]))
    if event == "socket.connect":
        address = args[1]
        return ":".join(map(str, address)) if isinstance(address, tuple) else repr(address)
    if event == "exec":
        return f"{args[0].co_filename}:{args[0].co_name}"
    return " ".join(repr(arg)[:100] for arg in args)


def _loaded_sources() -> set[str]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {os.path.realpath(file) for file in files if file is not None}
