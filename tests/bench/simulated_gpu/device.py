"""A device whose work takes time and nothing else: `DeviceStreams` with a clock, and the `DeviceWork` of a step.

What a launch writes, it writes at once on the submitting thread, in the order of submission. Only the times are the
device's: a stream's work begins when it was submitted and all before it is done, and an event happens then. Tokens are
arbitrary; where answers end is right, so that schedule and allocate meet what they would meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.kernels.layout import step_state
from millrace.runtime.device_streams.interface import DeviceEvent, DeviceGraph
from millrace.stages.backends.cuda.device_work import TorchDeviceWork
from millrace.stages.messages import Ints
from millrace.stages.outputs import GraphBatch
from tests.bench.simulated_gpu import fits

COPY_US = 4.0  # a small copy between device and host
CHOSEN = 300  # the token of each row


class TimedStreams:
    """Streams with time lines, in nanoseconds of `time.perf_counter_ns`.

    `launch_us` is what the driver takes to launch a graph, without the interpreter lock. `speed` divides step times.
    """

    def __init__(self, launch_us: float, speed: float = 1.0) -> None:
        self.launch_us, self.speed = launch_us, speed
        self.busy_ns = 0  # of steps
        self.slept_ns = 0  # by launches, on the device thread
        self.compute: TimedStream | None = None

    def stream(self, name: str) -> TimedStream:
        stream = TimedStream(name, self)
        if name == "compute":
            self.compute = stream
        return stream

    def event(self) -> TimedEvent:
        return TimedEvent()

    def wait(self) -> None:
        if self.compute is not None:
            _sleep_until(self.compute.free_ns)

    def free_bytes(self) -> int:
        return 0

    def probe(self) -> None:
        self.wait()

    def take(self, seconds_us: float) -> None:
        """Occupies the compute stream for a step of that many microseconds."""
        assert self.compute is not None
        taken_ns = int(1000 * seconds_us / self.speed)
        self.busy_ns += taken_ns
        self.compute.occupy(taken_ns)


class TimedEvent:
    """A moment. See `DeviceEvent`."""

    def __init__(self) -> None:
        self.at_ns = 0

    def query(self) -> bool:
        return time.perf_counter_ns() >= self.at_ns

    def wait(self) -> None:
        _sleep_until(self.at_ns)

    def us_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, TimedEvent)
        return (self.at_ns - earlier.at_ns) / 1000


class TimedGraph:
    """The captured launches."""

    num_bytes = 0

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        self.launches = launches


class TimedStream:
    """See `DeviceStream`."""

    def __init__(self, name: str, device: TimedStreams) -> None:
        self.name = name
        self.free_ns = 0  # when all submitted work is done
        self._device = device
        self._captured: list[Callable[[], object]] | None = None

    def occupy(self, taken_ns: int) -> None:
        self.free_ns = max(self.free_ns, time.perf_counter_ns()) + taken_ns

    def use(self) -> None:
        pass

    def launch(self, run: Callable[[], object]) -> None:
        if self._captured is not None:
            self._captured.append(run)
        else:
            run()

    def copy(self, destination: Any, source: Any) -> None:
        destination[...] = source
        self.occupy(int(1000 * COPY_US))

    def record(self, event: DeviceEvent) -> None:
        assert isinstance(event, TimedEvent)
        event.at_ns = max(self.free_ns, time.perf_counter_ns())

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, TimedEvent)
        self.free_ns = max(self.free_ns, event.at_ns)

    def capture(self, run: Callable[[], object]) -> TimedGraph:
        self._captured = []
        try:
            run()
            return TimedGraph(self._captured)
        finally:
            self._captured = None

    def replay(self, graph: DeviceGraph) -> None:
        assert isinstance(graph, TimedGraph)
        if self._device.launch_us:
            began = time.perf_counter_ns()
            time.sleep(self._device.launch_us / 1e6)
            self._device.slept_ns += time.perf_counter_ns() - began
        for run in graph.launches:
            run()


class TimedWork(TorchDeviceWork):
    """The launches take the fitted time, and the tokens of rows are made up; steps of the warm-up are free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.streams: TimedStreams | None = None  # set after the start
        self._diff: Ints = np.asarray(self._memory.diff)
        self._result: Ints = np.asarray(self._memory.result)
        self._state: Ints = np.asarray(self.slots.state)

    def apply_updates(self) -> None:
        """Keeps what decides where answers end."""
        diff, count = self._diff, int(self._diff[step_state.NUM_STARTED])
        if count:
            at = int(diff[step_state.STARTED_AT])
            started = diff[at : at + count * (1 + step_state.STATE_WIDTH)].reshape(count, -1)
            self._state[started[:, 0]] = started[:, 1:]

    def make_inputs(self, batch: GraphBatch) -> None:
        pass

    def forward(self, batch: GraphBatch) -> None:
        count, at = int(self._diff[step_state.NUM_ROWS]), int(self._diff[step_state.ROWS_AT])
        rows = self._diff[at : at + 4 * count + 1]
        if self.streams is not None:
            self.streams.take(fits.step_us(rows[count : 2 * count], np.diff(rows[2 * count : 3 * count + 1])))

    def sample(self, batch: GraphBatch, kind: int) -> None:
        count, at = int(self._diff[step_state.NUM_ROWS]), int(self._diff[step_state.ROWS_AT])
        rows = self._diff[at : at + 4 * count + 1]
        is_sampled = rows[3 * count + 1 :] >= 0
        places, slots = rows[3 * count + 1 :][is_sampled], rows[:count][is_sampled]
        state = self._state
        goes_on = state[slots, step_state.FINISHED] == step_state.GOES_ON
        state[slots, step_state.TOKENS] += goes_on
        is_over = goes_on & (state[slots, step_state.TOKENS] >= state[slots, step_state.LIMIT])
        state[slots[is_over], step_state.FINISHED] = step_state.LENGTH
        self._result[0, places] = np.where(goes_on, CHOSEN, -1)
        self._result[1, places] = state[slots, step_state.FINISHED]


def _sleep_until(at_ns: int) -> None:
    left_ns = at_ns - time.perf_counter_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
