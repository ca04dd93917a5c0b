"""What a stage is: typed ports, `handle`, and the policy after a crash.

`stage_runner.py` runs it.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from .channel import ControlLane
from .env.env import Env
from .histogram import Histogram
from .stage_metrics import StageMetrics
from .trace.tracer import Tracer

In = TypeVar("In")
Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class Crash(enum.Enum):
    """What the supervisor does after an unexpected exception of `handle`."""

    FAIL = "fail"  # end the requests of the batch and go on: the stage keeps no state between calls
    ISOLATE = "isolate"  # restart, and retry each item of the batch alone once; an item that crashes again fails
    RECOVER = "recover"  # the stage holds state for many requests: its own `recover` repairs it
    ESCALATE = "escalate"  # no recovery: the pipeline is dead


def _none(key: str | int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Context:
    """What a running stage has access to.

    Given to `setup`; the same object for the stage's whole life.
    """

    env: Env
    tracer: Tracer
    source: int  # this stage's id in trace records
    lane: ControlLane  # control messages for this stage, empty unless the pipeline routes some here
    is_live: Callable[[str], bool]  # whether a request has not ended; always true in a slice without an exit
    escalate: Callable[[BaseException], None]  # declares the pipeline dead; every live request ends with an error
    find_request: Callable[[str | int], Any] = _none  # the live request of a request's or sequence's id; None: none
    metrics: StageMetrics = field(default_factory=StageMetrics)  # of the stage, exported under its name


class Outlet(Protocol[Out_co]):
    """Where `handle` puts its results.

    Nothing is delivered before `handle` returns or awaits `flush`.
    """

    def send(self, item: Any, port: str = "out") -> None:
        """Collects `item` for the channel at output port `port`. Never waits."""

    async def flush(self) -> None:
        """Delivers what was collected, waiting for room. For a stage that makes many items from one."""

    def fail(self, item: Any, error: BaseException) -> None:
        """Ends the request (or requests) of `item` with `error`. The rest of the batch goes on."""

    def reply(self, item: Any) -> None:
        """Passes `item` straight to the pipeline's exit, past the stages between (a cache hit)."""


class Stage(Generic[In, Out]):
    """One actor: owns its state, runs as its own task, and communicates only through its ports.

    Subclass with the two types, `class Clip(Stage[TokenRequest, TokenRequest])`, and write `handle`. A stage with more
    ports names them in `inputs` and `outputs`; `handle` then gets the items of all input ports in one batch, in the
    order of `inputs`. Items whose request has ended are dropped before `handle` sees them.
    """

    inputs: ClassVar[Mapping[str, Any]] = {"in": Any}
    outputs: ClassVar[Mapping[str, Any]] = {"out": Any}
    on_crash: ClassVar[Crash] = Crash.ISOLATE
    reads_lane: ClassVar[bool] = False  # True: a post to the control lane calls `handle`, if need be with no items
    error_code: ClassVar[str] = "internal_error"  # for a request that this stage failed on

    @property
    def name(self) -> str:
        """The stage's default name in a pipeline."""
        return type(self).__name__.lower()

    @property
    def concurrency(self) -> int | None:
        """None: `handle` gets whole batches, one at a time.

        N: single items, up to N at a time, each in a task that is cancelled when its request ends; in order if N is 1.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        taken, made = _declared_types(cls)
        if taken is not None and "inputs" not in cls.__dict__:
            cls.inputs = {"in": taken}
        if made is not None and "outputs" not in cls.__dict__:
            cls.outputs = _output(made)

    @property
    def has_work(self) -> bool:
        """Whether it holds work that should make progress, besides what `handle` has in hand."""
        return False

    @property
    def expected_s(self) -> float:
        """Seconds that `handle` is expected to take for what it has in hand; 0: unknown."""
        return 0.0

    @property
    def waits_for(self) -> str | None:
        """The name of another stage whose work `handle` waits for now, or None."""
        return None

    def busy_s(self, handle_s: float, now_s: float) -> float:
        """Seconds that it has worked up to `now_s`; `handle` had something for `handle_s` of them.

        Override where `handle` waits for another stage's work, or where work goes on after `handle`. The time of work
        then counts for the stage that does it, in every view of the pipeline. It must never decrease.
        """
        return handle_s

    @property
    def service_us(self) -> Histogram | None:
        """Its own measurements of its work on a batch; None: the time in `handle` is measured."""
        return None

    async def setup(self, context: Context) -> None:
        """Called before the first `handle`, and again after each restart."""

    async def handle(self, batch: Sequence[In], out: Outlet[Out]) -> None:
        """Processes all waiting items.

        An exception is a bug; the supervisor handles it as `on_crash` says.
        """
        raise NotImplementedError(f"stage {self.name}: write handle(batch, out)")

    def ended(self, request_id: str, cause: str) -> None:
        """Called once a request has ended, for a stage that keeps state by request: drop it here.

        `cause` is "finish", "error", "cancel", "disconnect", "deadline", "abort" or another word of the exit. Called on
        the loop after the last `handle` with an item of the request, and between two calls of `handle` unless
        `concurrency` is set; also for requests that never came here, and none twice. What belongs to several requests
        (a step) may still name it afterwards. An exception is logged.
        """

    async def recover(self, batch: Sequence[In], error: BaseException, out: Outlet[Out]) -> None:
        """Repairs the state after `handle(batch)` raised, for `Crash.RECOVER`.

        Raising here escalates.
        """
        raise error

    async def teardown(self) -> None:
        """Called once after the last `handle`, also after a crash, and before a restart."""

    def wants(self, port: str) -> bool:
        """Whether to receive from `port` now. Other items stay queued and hold their senders back."""
        return True

    def wakes(self, port: str) -> bool:
        """Whether an arrival at `port` should wake the stage.

        If not, the item is received at the next wakeup: return False only if one is sure to come.
        """
        return True


def _declared_types(cls: type) -> tuple[Any, Any]:
    """The arguments of a `Stage[In, Out]` that `cls` itself names as a base; else (None, None)."""
    for base in cls.__dict__.get("__orig_bases__", ()):
        origin = typing.get_origin(base)
        if origin is not None and isinstance(origin, type) and issubclass(origin, Stage):
            arguments = typing.get_args(base)
            if len(arguments) == 2:
                taken, made = arguments
                return _known(taken), _known(made)
    return None, None


def _known(declared: Any) -> Any:
    return Any if isinstance(declared, TypeVar) else declared


def _output(made: Any) -> dict[str, Any]:
    """The output ports of a stage that makes `made`: a sink makes None or Never, and has none."""
    return {} if made is typing.Never or made is types.NoneType else {"out": made}


# -- a plain function as a stage

Function = Callable[[Any], Any]


@dataclass
class FunctionStage(Stage[Any, Any]):
    """A stage made from a function of one item; see `stage`."""

    function: Function
    title: str
    takes: Any = Any
    makes: Any = Any
    at_once: int = 1
    on_crash: ClassVar[Crash] = Crash.FAIL
    inputs: Mapping[str, Any] = field(init=False)  # type: ignore[misc]
    outputs: Mapping[str, Any] = field(init=False)  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.inputs = {"in": self.takes}
        self.outputs = _output(self.makes)

    @property
    def name(self) -> str:
        return self.title

    @property
    def concurrency(self) -> int | None:
        return self.at_once

    async def handle(self, batch: Sequence[Any], out: Outlet[Any]) -> None:
        for item in batch:
            async for made in _results(self.function(item)):
                out.send(made)


async def _results(result: Any) -> AsyncIterator[Any]:
    """The results of a stage function for one item.

    It may return, await or yield; None means no result.
    """
    if inspect.isawaitable(result):
        result = await result
    if inspect.isasyncgen(result):
        async for made in result:
            yield made
    elif isinstance(result, types.GeneratorType):
        for made in cast(Iterable[Any], result):
            yield made
    elif result is not None:
        yield result


@typing.overload
def stage(function: Function, /) -> FunctionStage: ...
@typing.overload
def stage(*, name: str | None = None, concurrency: int = 1) -> Callable[[Function], FunctionStage]: ...


def stage(
    function: Function | None = None, /, *, name: str | None = None, concurrency: int = 1
) -> FunctionStage | Callable[[Function], FunctionStage]:
    """Turns a function of one item into a stage.

    Example: `async def shout(request: TokenRequest) -> TokenRequest`.

    The function may be plain or async, return one item or None (no result), or yield several. Port types are read from
    its annotations; a parameter without one takes anything. An exception ends the request of that item. With
    `concurrency` above 1, items may overtake each other.
    """

    def build(wrapped: Function) -> FunctionStage:
        takes, makes = _annotations(wrapped)
        return FunctionStage(wrapped, name or wrapped.__name__, takes, makes, concurrency)

    return build if function is None else build(function)


def _annotations(function: Function) -> tuple[Any, Any]:
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 1:
        raise TypeError(f"@stage function {function.__name__} takes {len(parameters)} parameters: it must take one")
    makes = hints.get("return", Any)
    if typing.get_origin(makes) is not None and inspect.isclass(typing.get_origin(makes)):
        origin = typing.get_origin(makes)
        if issubclass(origin, (typing.AsyncIterator, typing.Iterator, typing.AsyncIterable)):
            makes = typing.get_args(makes)[0]
    return hints.get(parameters[0], Any), _without_none(makes)


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kept = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        return typing.Union[tuple(kept)]  # noqa: UP007
    return annotation
