"""A simulated asynchronous device: streams, events and copies on host arrays.

Submitted work runs later, piece by piece, during other submissions and waits. A seed decides which stream runs next;
only a wait guarantees that something is done. Copies happen in pieces: the destination holds garbage first, and other
work runs in between. A missing wait therefore shows in the data: as an old value, a half-written one, or a value of a
later request.

Arrays are numpy's, or objects that numpy can view in place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from .interface import DeviceEvent, DeviceGraph, DeviceStream

GARBAGE = 0x6B
COPY_PIECES = 2
WEIGHTS = (1.0, 1.0, 0.03)  # of streams, drawn for each: a few are slow


class DeviceStuck(AssertionError):
    """Every stream waits for an event that cannot happen.

    It is queued behind another stream's wait.
    """


class SimStreams:
    """Streams that progress in the order drawn from `random`.

    `laziness`: the share of calls after which no work runs. Some streams are drawn to be slow: they mostly run last.

    An operation that raises breaks the device, as on a GPU: every later wait raises that error. `lose_after` plants the
    loss of the device.
    """

    def __init__(self, random: Random, laziness: float = 0.5) -> None:
        self.num_done = 0  # operations
        self._random = random
        self._laziness = laziness
        self._streams: list[SimStream] = []
        self._weights: list[float] = []  # by stream: how likely it runs next
        self._error: BaseException | None = None
        self._loss: _Loss | None = None
        self.lock = threading.RLock()  # one thread at a time uses the device
        self._used: dict[int, str] = {}  # by thread: the stream it uses

    def stream(self, name: str) -> SimStream:
        stream = SimStream(name, self)
        self._streams.append(stream)
        self._weights.append(self._random.choice(WEIGHTS))
        return stream

    def event(self) -> SimEvent:
        return SimEvent(self)

    @property
    def used(self) -> str | None:
        """The name of the stream that the calling thread uses. None: it uses none.

        Work it does outside the streams runs at once here, but would be unordered on a real device.
        """
        return self._used.get(threading.get_ident())

    def wait(self) -> None:
        self.run_until(lambda: not any(stream.waiting for stream in self._streams))

    def free_bytes(self) -> int:
        """Returns 0: nothing is counted."""
        return 0

    def probe(self) -> None:
        event = self.event()
        if self._streams:
            self._streams[0].launch(_nothing)
            self._streams[0].record(event)
        self.wait()
        event.wait()

    def lose_after(
        self,
        num_operations: int,
        error: BaseException,
        hang: Callable[[], object] | None = None,
        *,
        refuses: bool = False,
        is_silent: bool = False,
    ) -> None:
        """Loses the device when so many more operations are done: nothing runs from then on.

        Every later wait for something that is not done raises `error`. With `hang` only the first one does at once, and
        the others call `hang`, which blocks, and raise when it returns; `is_silent`: the first one too. `refuses`:
        submissions raise `error` too.
        """
        self._loss = _Loss(self.num_done + num_operations, error, hang, refuses, is_told=is_silent)

    @property
    def is_lost(self) -> bool:
        """Whether the planted loss has happened."""
        return self._loss is not None and self.num_done >= self._loss.at

    def progress(self) -> None:
        """Runs a drawn number of operations, often none."""
        with self.lock:
            if self._random.random() < self._laziness:
                return
            for _ in range(self._random.choice((1, 2, 4, 16))):
                if not self._step():
                    return

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Runs operations until `is_done()`, and perhaps some more."""
        if not self._run_until(is_done):
            assert self._loss is not None and self._loss.hang is not None
            self._loss.hang()
            raise self._loss.error

    def _run_until(self, is_done: Callable[[], bool]) -> bool:
        """As `run_until`. False: the device hangs."""
        with self.lock:
            while not is_done():
                if self._loss is not None and self.is_lost:
                    if self._loss.is_told and self._loss.hang is not None:
                        return False
                    self._loss.is_told = True
                    raise self._loss.error
                if self._error is None and not self._step():
                    heads = (f"{stream.name}: {stream.waiting[0]}" for stream in self._streams if stream.waiting)
                    raise DeviceStuck(f"nothing on the device can go on: {', '.join(heads)}")
                if self._error is not None:
                    raise self._error
            self.progress()
            return True

    def _step(self) -> bool:
        """Runs one operation of some stream. Returns False if none can run."""
        ready = [i for i, stream in enumerate(self._streams) if stream.waiting and stream.waiting[0].is_ready()]
        if not ready or self._error is not None or self.is_lost:
            return False
        stream = self._streams[ready[0] if len(ready) == 1 else self._choose(ready)]
        operation = stream.waiting[0]
        self.num_done += 1
        try:
            if operation.run():
                stream.waiting.popleft()
        except BaseException as error:
            self._error = error
        return True

    def refuse_if_lost(self) -> None:
        """Raises the error of a lost device that takes no more work."""
        if self._loss is not None and self._loss.refuses and self.is_lost:
            self._loss.is_told = True
            raise self._loss.error

    def _choose(self, ready: list[int]) -> int:
        (chosen,) = self._random.choices(ready, [self._weights[i] for i in ready])
        return chosen


@dataclass(slots=True)
class _Loss:
    """See `SimStreams.lose_after`."""

    at: int  # operations
    error: BaseException
    hang: Callable[[], object] | None
    refuses: bool
    is_told: bool = False  # `error` was raised


def _nothing() -> None:
    pass


class SimEvent:
    """An event. Recordings are numbered; the event is done when the last one is."""

    def __init__(self, device: SimStreams) -> None:
        self._device = device
        self.num_recorded = 0
        self.num_happened = 0
        self.happened_at = 0  # in operations of the device, which count as microseconds

    def query(self) -> bool:
        self._device.progress()
        return self.num_happened == self.num_recorded

    def wait(self) -> None:
        number = self.num_recorded
        self._device.run_until(lambda: self.num_happened >= number)

    def us_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, SimEvent)
        for event in (self, earlier):
            assert event.num_recorded and event.num_happened == event.num_recorded, "an event that is not done"
        return float(self.happened_at - earlier.happened_at)


class SimGraph:
    """The captured launches."""

    num_bytes = 0

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        self.launches = launches
        self.num_replays = 0


class SimStream:
    """Operations in order. See `DeviceStream`."""

    def __init__(self, name: str, device: SimStreams) -> None:
        self.name = name
        self.waiting: deque[_Operation] = deque()
        self._device = device
        self._captured: list[Callable[[], object]] | None = None

    def use(self) -> None:
        """Work outside the streams runs at once here.

        Its caller has waited for what must precede it. See `SimStreams.used`.
        """
        self._device._used[threading.get_ident()] = self.name

    def launch(self, run: Callable[[], object]) -> None:
        if self._captured is not None:
            self._captured.append(run)
        else:
            self._submit(_Launch(run))

    def copy(self, destination: Any, source: Any) -> None:
        assert destination.nbytes == source.nbytes, f"{source.nbytes} bytes are copied to {destination.nbytes}"
        self._submit(_Copy(destination, source))

    def record(self, event: DeviceEvent) -> None:
        assert isinstance(event, SimEvent)
        event.num_recorded += 1
        self._submit(_Record(event, event.num_recorded, self._device))

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, SimEvent)
        self._submit(_Wait(event, event.num_recorded))

    def capture(self, run: Callable[[], object]) -> SimGraph:
        assert self._captured is None, "a capture inside a capture"
        self._captured = []
        try:
            run()
            return SimGraph(self._captured)
        finally:
            self._captured = None

    def replay(self, graph: DeviceGraph) -> None:
        assert isinstance(graph, SimGraph)
        graph.num_replays += 1
        for run in graph.launches:
            self.launch(run)

    def _submit(self, operation: _Operation) -> None:
        assert self._captured is None, f"{type(operation).__name__.strip('_')} while a graph is captured"
        with self._device.lock:
            self._device.refuse_if_lost()
            self.waiting.append(operation)
        self._device.progress()


class _Operation:
    """One operation in a stream."""

    def is_ready(self) -> bool:
        return True

    def run(self) -> bool:
        """Runs the operation or a part of it. Returns whether it is finished."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return type(self).__name__.strip("_").lower()


class _Launch(_Operation):
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def run(self) -> bool:
        self._run()
        return True


class _Copy(_Operation):
    """A copy in steps: garbage, then half, then the rest.

    Each step reads the source when it runs.
    """

    def __init__(self, destination: Any, source: Any) -> None:
        self._to, self._from = _bytes_of(destination), _bytes_of(source)
        self._num_done = -1

    def run(self) -> bool:
        if self._num_done < 0:
            self._to[:] = GARBAGE
        else:
            ends = [len(self._to) * i // COPY_PIECES for i in range(COPY_PIECES + 1)]
            piece = slice(ends[self._num_done], ends[self._num_done + 1])
            self._to[piece] = self._from[piece]
        self._num_done += 1
        return self._num_done == COPY_PIECES


class _Record(_Operation):
    def __init__(self, event: SimEvent, number: int, device: SimStreams) -> None:
        self._event, self._number, self._device = event, number, device

    def run(self) -> bool:
        self._event.num_happened = self._number
        self._event.happened_at = self._device.num_done
        return True


class _Wait(_Operation):
    def __init__(self, event: SimEvent, number: int) -> None:
        self._event, self._number = event, number

    def is_ready(self) -> bool:
        return self._event.num_happened >= self._number

    def run(self) -> bool:
        return True


def _bytes_of(array: Any) -> Any:
    """A view of the array's bytes."""
    found = np.asarray(array)
    assert found.flags.c_contiguous, "a copy of an array that is not contiguous"
    return found.reshape(-1).view(np.uint8)


__all__ = ["DeviceStuck", "SimEvent", "SimGraph", "SimStream", "SimStreams", "DeviceStream"]
