"""How far loading a model is: the phase, and bytes by file. Written by the threads that load, read by any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LoadPhase = Literal["start", "download", "compile", "read", "pack", "join", "probe"]
VERBS: dict[LoadPhase, str] = {
    "start": "starting",
    "download": "downloading files",
    "compile": "compiling the native library, once",
    "read": "reading weights",
    "pack": "packing weights",
    "join": "waiting for the other ranks",
    "probe": "measuring steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """A moment of a start. Bytes are those of the phase."""

    phase: LoadPhase
    seconds: float  # since the phase began
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> bytes done, bytes in total
    num_bytes_before: int = 0  # of those done: bytes that were there when the phase began, as of a resumed download

    @property
    def num_bytes(self) -> int:
        return sum(done for done, _ in self.files.values())

    @property
    def total_bytes(self) -> int:
        """0 while it is unknown."""
        return sum(total for _, total in self.files.values())

    @property
    def mb_per_s(self) -> float:
        return (self.num_bytes - self.num_bytes_before) / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None while there is nothing to tell it by."""
        left = self.total_bytes - self.num_bytes
        return left / 1e6 / self.mb_per_s if self.total_bytes and self.mb_per_s else None

    @property
    def percent(self) -> float | None:
        """None while the total is unknown."""
        return 100.0 * self.num_bytes / self.total_bytes if self.total_bytes else None

    def to_json(self) -> dict[str, Any]:
        """The figures, rounded, for an answer or a log line."""
        percent, left = self.percent, self.seconds_left
        return {
            "phase": self.phase,
            "num_bytes": self.num_bytes,
            "total_bytes": self.total_bytes,
            "percent": None if percent is None else round(percent, 1),
            "mb_per_s": round(self.mb_per_s, 1),
            "seconds_left": None if left is None else round(left, 1),
        }

    def to_text(self) -> str:
        """The figures in words: reading weights, 42 % of 16.1 GB, 812 MB/s, 12 s left."""
        percent, left = self.percent, self.seconds_left
        text = VERBS[self.phase]
        if percent is not None:
            text += f", {percent:.0f} % of {self.total_bytes / 1e9:.1f} GB, {self.mb_per_s:.0f} MB/s"
        return text if left is None else f"{text}, {left:.0f} s left"


class LoadProgress:
    """The progress of one start. Thread-safe.

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase: LoadPhase = "start"
        self._began_s = clock()
        self._files: dict[str, tuple[int, int]] = {}
        self._num_before: dict[str, int] = {}
        self._from_elsewhere: LoadState | None = None

    def begin(self, phase: LoadPhase, file_bytes: Mapping[str, int] | None = None) -> None:
        """A phase begins, with the bytes of each file that it will process, where these are known."""
        with self._lock:
            self._phase, self._began_s = phase, self._clock()
            self._files = {name: (0, total) for name, total in (file_bytes or {}).items()}
            self._num_before = {}

    def expect(self, file_bytes: Mapping[str, int]) -> None:
        """Sets the bytes of each file of the phase."""
        self.begin(self._phase, file_bytes)

    def add(self, file: str, num_bytes: int) -> None:
        """More bytes of a file are done."""
        with self._lock:
            done, total = self._files.get(file, (0, 0))
            self._files[file] = done + num_bytes, total

    def set(self, file: str, num_bytes: int, total_bytes: int) -> None:
        """So many bytes of a file are done. Those of the first call count as done before the phase began."""
        with self._lock:
            self._num_before.setdefault(file, num_bytes)
            self._files[file] = num_bytes, total_bytes

    def follow(self, state: LoadState) -> None:
        """Tells `state`, of a process that loads the model, from now on."""
        self._from_elsewhere = state

    def state(self) -> LoadState:
        """The present state."""
        if self._from_elsewhere is not None:
            return self._from_elsewhere
        with self._lock:
            return LoadState(
                phase=self._phase,
                seconds=self._clock() - self._began_s,
                files=dict(self._files),
                num_bytes_before=sum(self._num_before.values()),
            )
