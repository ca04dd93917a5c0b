"""The outlet of a stage: collects what it sends during a batch, for delivery afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .channel import Channel
from .exit import Exit
from .graph import Edge


@dataclass(frozen=True, slots=True)
class Output:
    """One output port: its channel, and the taps that get lossy copies."""

    channel: Channel[Any]
    edge: Edge | None
    taps: list[Channel[Any]]


class Deliverer(Protocol):
    """What an outlet needs of the stage's runner."""

    name: str
    outputs: dict[str, Output]
    exit: Exit[Any] | None

    def deliver_at_once(self, out: CollectingOutlet) -> bool: ...

    async def deliver(self, out: CollectingOutlet) -> None: ...

    def fail(self, item: Any, error: BaseException) -> None: ...


class CollectingOutlet:
    """The `Outlet` that a runner gives to `handle`.

    It collects items; the runner delivers them after `handle`.
    """

    __slots__ = ("_outputs", "_runner", "blocked_s", "has_flushed", "items")

    def __init__(self, runner: Deliverer) -> None:
        self._runner = runner
        self._outputs = runner.outputs
        self.items: list[tuple[Output, Any]] = []  # not delivered yet
        self.blocked_s = 0.0  # spent waiting for room
        self.has_flushed = False

    def send(self, item: Any, port: str = "out") -> None:
        output = self._outputs.get(port)
        if output is None:
            raise KeyError(f"stage {self._runner.name} has no output {port}: it has {', '.join(self._outputs)}")
        self.items.append((output, item))

    async def flush(self) -> None:
        if self.items:
            self.has_flushed = True
            if not self._runner.deliver_at_once(self):
                await self._runner.deliver(self)

    def discard(self) -> None:
        """Drops what was collected and not delivered."""
        self.items.clear()

    def fail(self, item: Any, error: BaseException) -> None:
        self._runner.fail(item, error)

    def reply(self, item: Any) -> None:
        if self._runner.exit is None:
            raise RuntimeError(f"stage {self._runner.name} replies, but this slice has no exit: include the last stage")
        self._runner.exit.deliver(item)
