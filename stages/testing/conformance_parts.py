"""The parts around a stage under conformance tests: what enters, a wrapper of the stage, and an exit that counts."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import numpy as np

from ...runtime.exit import Exit
from ...runtime.stage import Context, Outlet, Stage


class EntrantItem:
    """What enters: an item, and the request that it belongs to. A message of a step does not name that itself."""

    def __init__(self, request_id: str, item: Any) -> None:
        self.request_id = request_id
        self.item = item


class PoisonItem:
    """An item that raises on any attribute access but `request_id`."""

    def __init__(self, request_id: str, i: int) -> None:
        self.request_id = request_id

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"poison: {name} was read")


class EntryStage(Stage[Any, Any]):
    """The entry stage.

    With it, the channel before the stage under test has the caller's capacity.
    """

    async def handle(self, batch: Sequence[Any], out: Outlet[Any]) -> None:
        for entrant in batch:
            out.send(entrant.item)


class ObservedStage(Stage[Any, Any]):
    """A wrapper of the stage under test that counts the items it holds."""

    def __init__(self, stage: Stage[Any, Any], exit: CountingExit) -> None:
        if set(stage.inputs) != {"in"} or not set(stage.outputs) <= {"out"}:
            ports = ", ".join([*stage.inputs, *stage.outputs])
            raise ValueError(f"stage {stage.name} has the ports {ports}: must be in and out")
        self.stage = stage
        self.exit = exit
        self.inputs = {"in": Any}  # type: ignore[misc]
        self.on_crash = stage.on_crash  # type: ignore[misc]
        self.has_swallowed = False
        self.most_held = 0
        self._held: set[str] = set()  # requests whose item is in the stage

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def concurrency(self) -> int | None:
        return self.stage.concurrency

    async def setup(self, context: Context) -> None:
        await self.stage.setup(context)

    async def handle(self, batch: Sequence[Any], out: Outlet[Any]) -> None:
        await self._watch(batch, out, self.stage.handle)

    async def recover(self, batch: Sequence[Any], error: BaseException, out: Outlet[Any]) -> None:
        await self.stage.recover(batch, error, WatchedOutlet(out, self))

    def ended(self, request_id: str, cause: str) -> None:
        self.stage.ended(request_id, cause)

    async def teardown(self) -> None:
        await self.stage.teardown()

    async def _watch(self, batch: Sequence[Any], out: Outlet[Any], handle: Callable[..., Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        came = {request_id for item in batch for request_id in self.exit.requests_of(item)}
        self._held = {name for name in self._held if self.exit.is_live(name)} | came
        self.most_held = max(self.most_held, len(self._held))
        await handle(batch, WatchedOutlet(out, self))
        self.has_swallowed |= task.cancelling() > before

    def let_go(self, item: Any) -> None:
        """Records that `item` has left the stage."""
        self._held.difference_update(self.exit.requests_of(item))


class WatchedOutlet:
    """A wrapper of the outlet that reports items which leave the stage."""

    def __init__(self, out: Outlet[Any], watched: ObservedStage) -> None:
        self._out = out
        self._watched = watched

    def send(self, item: Any, port: str = "out") -> None:
        self._watched.let_go(item)
        self._out.send(item, port)

    async def flush(self) -> None:
        await self._out.flush()

    def fail(self, item: Any, error: BaseException) -> None:
        self._watched.let_go(item)
        self._out.fail(item, error)

    def reply(self, item: Any) -> None:
        self._watched.let_go(item)
        self._out.reply(item)


class UnreadOutbox:
    """An outbox that only keeps its error."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.error: BaseException | None = None

    def end(self, cause: str, error: BaseException | None) -> None:
        self.error = error

    def __aiter__(self) -> AsyncIterator[Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """What a stage reads of a request that it finds by the number of a sequence."""

    request_id: str
    first_sequence_id: int
    num_sequences: int
    owner: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent_id: str | None = None
    is_warm_up: bool = False


class CountingExit(Exit[UnreadOutbox]):
    """Counts what comes out, and ends a request once it is complete."""

    def __init__(self, expected: Mapping[int, int]) -> None:
        super().__init__()
        self.gate = asyncio.Event()  # closed: nothing leaves the stage
        self.gate.set()
        self.num_out: Counter[int] = Counter()  # item -> outputs and replies
        self.num_after_end: Counter[int] = Counter()  # those after the end of its request
        self.first_out: list[int] = []  # items, in the order of their first output
        self.errors: dict[int, BaseException] = {}
        self.on_end.append(self._note_end)
        self._expected = expected
        self.names_requests = True  # whether items have a `request_id`
        self._items: dict[str, int] = {}  # request id -> item
        self._owners: dict[int, str] = {}  # sequence id -> request id
        self._steps: dict[int | None, str] = {}  # step -> request id, of messages of a step

    def make_outbox(self, request: Any) -> UnreadOutbox:
        return UnreadOutbox(request.request_id)

    def note_item(self, i: int, request_id: str, item: Any) -> None:
        """Registers item i of a request before it enters."""
        self._items[request_id] = i
        if isinstance(item, PoisonItem):
            return
        self.names_requests = hasattr(item, "request_id")
        first = getattr(item, "first_sequence_id", None)
        if first is not None:
            num_choices = getattr(getattr(item, "params", None), "n", 1)
            count = int(getattr(item, "num_sequences", num_choices))
            self._owners.update((first + k, request_id) for k in range(count))
        self._owners.update(dict.fromkeys(_sequence_ids(item), request_id))
        if not self.names_requests and _step(item) is not None:
            self._steps[_step(item)] = request_id

    def requests_of(self, item: Any) -> Iterable[str]:
        if isinstance(item, str):
            return (item,)
        if hasattr(item, "request_id"):
            return (item.request_id,)
        owners = [self._owners.get(sequence_id) for sequence_id in _sequence_ids(item)] or [
            self._steps.get(_step(item))
        ]
        return tuple(dict.fromkeys(owner for owner in owners if owner is not None))

    def find_request(self, key: str | int) -> FoundRequest | None:
        request_id = self.owner_of(key) if isinstance(key, str) else self._owners.get(int(key))
        if request_id is None or not self.is_live(request_id):
            return None
        own = [number for number, owner in self._owners.items() if owner == request_id]
        return FoundRequest(request_id, min(own, default=-1), max(1, len(own)), f"owner-{self._items[request_id] % 2}")

    def owner_of(self, key: object) -> str | None:
        """The request that a key names. Numbers name sequences, where items do not name their requests."""
        if isinstance(key, str):
            return key if key in self._items else None
        if self.names_requests or isinstance(key, bool) or not isinstance(key, (int, np.integer)):
            return None
        return self._owners.get(int(key))

    async def handle(self, batch: Sequence[Any], out: Outlet[Never]) -> None:
        await self.gate.wait()
        await super().handle(batch, out)

    def deliver(self, item: Any) -> None:
        for request_id in self.requests_of(item):
            i = self._items[request_id]
            self.num_out[i] += 1
            self.num_after_end[i] += not self.is_live(request_id)
            if self.num_out[i] == 1:
                self.first_out.append(i)
            if self.num_out[i] >= self._expected.get(i, 1 << 30) or isinstance(item, PoisonItem):
                self.end(request_id, "finished")

    def _note_end(self, box: UnreadOutbox, cause: str, error: BaseException | None) -> None:
        if error is not None:
            self.errors[self._items[box.request_id]] = error


def _sequence_ids(item: Any) -> list[int]:
    """The sequences that a message of a step names: of its rows, those that start with it, and pooled ones."""
    item = getattr(item, "grant", item)
    pooled = getattr(item, "pooled", ())
    pooled = pooled.values() if isinstance(pooled, Mapping) else pooled
    named = (*getattr(item, "started", ()), *pooled)
    found = [*getattr(item, "sequence_ids", ()), *(one.sequence_id for one in named)]
    return [int(sequence_id) for sequence_id in found]


def _step(item: Any) -> int | None:
    step = getattr(getattr(item, "grant", item), "step", None)
    return None if step is None else int(step)


def keys_in(value: object, depth: int = 3) -> Iterable[object]:
    """The keys and members of a container, and of those in it."""
    if isinstance(value, Mapping):
        yield from value
        inner: Iterable[object] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
        inner = value
    else:
        return
    if depth:
        for one in list(inner):
            yield from keys_in(one, depth - 1)
