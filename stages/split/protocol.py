"""The messages between front process and engine process, besides the items of channels.

    Setup, RequestsEnded, ControlCauses, StatusQuery,
    ReadAdapter, DropAdapter, Drain, Stop                      front  -> engine
    EngineReady, ModelLoading, NotStarted, RequestFailed,
    ServiceTimes, Admitted, Crashed, Broken, Draining, Gone, StatusReply,
    CoreReport, EngineLoad, KeyChange                                                    engine -> front

Plain data. The items are `TokenRequest` and `StepTokens`, from `stages/messages.py`. `CODEC` lists all types sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ...kernels.layout.kv_layout import KVKind, KVLayout
from ...kernels.layout.state_layout import StateLayout
from ...model.pooling import PoolingConfig
from ...runtime.channel import ChannelStats
from ...runtime.crash_recovery import StageCrashed
from ...runtime.fault_injection import Fault
from ...runtime.message import message
from ...runtime.processes.wire import Codec
from ...runtime.startup.load_progress import LoadState
from ..beam_search.algorithm import CandidateParams
from ..config import EngineConfig
from ..engine.engine_status import STATUS_TYPES
from ..errors import ErrorText, Failed, Refused, RequestError
from ..memory_table import MachineMemory, MemoryTable, MemoryUse
from ..messages import (
    AdapterRef,
    Begun,
    Pooled,
    PromptLogprobs,
    PromptProgress,
    Rates,
    Started,
    StepTokens,
    TokenRequest,
    TopLogprobs,
)
from ..outputs import CaptureReport, GraphBatch, ModelInfo, WeightUse
from ..params import SamplingParams, ThinkingBudget
from ..pooling_params import PoolingParams
from ..routing.engine_load import EngineLoad
from ..routing.reports import KeyChange
from ..schedule.step_timing.step_time_model import StepTimeCosts
from ..structured_outputs import StructuredOutputs, ThinkingSection

# -- start and stop


@message
class Setup:
    """The first message: what to load, and how to write the log."""

    config: EngineConfig
    log: Mapping[str, Any] | None
    first_step: int  # step numbers continue after those of the previous engine process, for the trace
    files: Mapping[str, str] | None = None  # digests of the model's files that must be loaded; None: any
    cpus: Sequence[int] = ()  # that the process may run on; (): all
    is_elsewhere: bool = False  # perhaps on another machine, whose files have other times
    # of all engine processes of a front, which routes by what they report; None: one of its own, and no reports
    prefix_key: bytes | None = None


@message
class EngineReady:
    """The model is loaded and the stages run."""

    info: ModelInfo
    seconds: Mapping[str, float]  # that each phase of the start took
    files: Mapping[str, str]  # digests of the model's files that were loaded, by name
    config: EngineConfig | None = None  # of an engine that has its own settings, whatever the front has
    instance: str = ""  # of the process, drawn at its start, if it goes on after the end of a link; "": it does not
    labels: Mapping[str, str] = field(default_factory=dict)  # what its operator says of it, such as its version
    served_names: Sequence[str] = ()  # under which fronts serve its model; (): under the model's own


@message
class ModelLoading:
    """How far the engine process is with loading the model."""

    state: LoadState


@message
class NotStarted:
    """The engine cannot start, and its process ends."""

    kind: str  # name of the error type: ConfigError, ModelError, or another
    reason: str


@message
class Stop:
    """Frees everything and ends the process."""


@message
class Drain:
    """An engine of several fronts is to take no new requests from now on, and to end once it has none."""

    by: str = ""  # "finish": its requests end there, "migrate": they go on elsewhere; "": as its settings say


@message
class Draining:
    """The engine takes no new requests, and ends once those that it has are over."""

    migrates: bool = False  # the front is to take them back now, and to send them elsewhere with their answers so far


@message
class Gone:
    """The engine closes the link now, by plan. The requests that it has left go on elsewhere."""


@message
class Broken:
    """A stage has failed for good, and the process ends."""

    stage: str
    reason: str  # of the health of its pipeline


@message
class Crashed:
    """A stage raised an error while it handled these requests; it was restarted."""

    stage: str
    error: str
    stack: Sequence[str]
    request_ids: Sequence[str]


# -- requests


@message
class RequestsEnded:
    """These requests have ended: their queued items are dropped."""

    request_ids: Sequence[str]


@message
class ControlCauses:
    """Entries of the control lane: sequence id -> cause."""

    causes: Mapping[int, str]


@message
class RequestFailed:
    """A stage of the engine process failed this request."""

    request_id: str
    kind: str  # of the error
    reason: str
    code: str
    param: str | None = None
    stage: str = ""
    pieces: Sequence[str] = ()  # of the reason, as in `ErrorText`; empty: it names no field

    @classmethod
    def of(cls, request_id: str, error: BaseException | None) -> RequestFailed:
        kind = type(error).__name__
        if isinstance(error, RequestError):
            return cls(request_id, kind, error.message, error.code, error.param, pieces=error.text.pieces)
        if isinstance(error, StageCrashed):
            return cls(request_id, kind, type(error.__cause__).__name__, error.code, stage=error.stage)
        return cls(request_id, kind, "", "internal_error")

    def error(self) -> Exception:
        """The error to end the request with, as a stage of this process would raise it."""
        if self.kind == "Refused":
            return Refused(ErrorText(tuple(self.pieces) or (self.reason,)), code=self.code, param=self.param)
        if self.kind == "StageCrashed":
            return StageCrashed(self.stage, self.code, engine_side_error(self.reason, ()))
        return Failed(self.reason or "internal error; see the server's log", code=self.code, param=self.param)


class EngineSideError(Exception):
    """Represents an error that the engine process has logged."""

    stack_elsewhere: Sequence[str] = ()


def engine_side_error(kind: str, stack: Sequence[str]) -> EngineSideError:
    """An exception whose type has the same name as the original one."""
    error: EngineSideError = type(kind, (EngineSideError,), {})()
    error.stack_elsewhere = stack
    return error


@message
class ServiceTimes:
    """Microseconds that a stage of the engine process spent on each of these requests."""

    stage: str
    times_us: Mapping[str, int]


@message
class Admitted:
    """These sequences were given slots."""

    sequence_ids: Sequence[int]


# -- questions and answers


@message
class StatusQuery:
    """A question, answered by a `StatusReply` with the same number."""

    number: int
    what: str  # "books", "blocks", "prefixes", "forget_prefixes", "inject", "stacks"
    faults: Sequence[Fault] = ()


@message
class StatusReply:
    """The answer to a `StatusQuery`; `error` says why there is none."""

    number: int
    value: Any = None
    error: str | None = None


# -- adapters


@message
class ReadAdapter:
    """Reads an adapter into the engine process's memory; answered by a `StatusReply` with an `AdapterCard`."""

    number: int
    path: str
    name: str  # for messages
    digest: str  # that it must have; "": any


@message
class AdapterCard:
    """An adapter in the engine process's memory; or why it is not there."""

    digest: str = ""
    parent: str | None = None
    rank: int = 0
    num_bytes: int = 0
    error: str = ""  # of an adapter that cannot be served
    lacks_thread: bool = False  # whether the system allows no thread to read it there
    residence: int = 0  # another one for each read, so that a late `DropAdapter` is known


@message
class DropAdapter:
    """Frees an adapter as soon as no device slot holds it, unless another read has stored it since."""

    digest: str
    residence: int = 0  # of the card that the front process has


CODEC = Codec(
    [
        *(TokenRequest, AdapterRef, StepTokens, Started, TopLogprobs, Pooled, Begun, PromptLogprobs, PromptProgress),
        *(SamplingParams, CandidateParams, PoolingParams, StructuredOutputs, ThinkingSection, ThinkingBudget),
        *(Setup, EngineReady, ModelLoading, LoadState, NotStarted, Stop, Broken, Crashed, EngineConfig),
        *(Drain, Draining, Gone),
        *(ModelInfo, WeightUse, Rates, MemoryTable, MemoryUse, MachineMemory, PoolingConfig, CaptureReport, GraphBatch),
        *(RequestsEnded, ControlCauses, RequestFailed, ServiceTimes, Admitted, StatusQuery, StatusReply, Fault),
        *(ReadAdapter, AdapterCard, DropAdapter, EngineLoad, StepTimeCosts, KeyChange),
        *STATUS_TYPES,
        *(ChannelStats, KVLayout, KVKind, StateLayout),
    ]
)
