"""What front and engine process say to each other besides the items of the two edges between them.

    Setup, Gone, Causes, Ask, Stop                     front  -> engine
    Ready, NotStarted, RequestFailed, Served, Admitted,
    Crashed, Broken, Told, Books                       engine -> front

Plain data. The items are `TokenRequest` and `StepTokens`, from `stages/messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.pooling import PoolingConfig
from ...runtime.channel import ChannelStats
from ...runtime.fault_injection import Fault
from ...runtime.message import message
from ...runtime.processes.wire import Codec
from ...runtime.stage_runner import StageCrashed
from ..beam_search.algorithm import CandidateParams
from ..config import EngineConfig
from ..errors import Failed, Refused, RequestError
from ..memory_table import Machine, MemoryRow, MemoryTable
from ..messages import (
    Begun,
    Ints,
    Pooled,
    PromptLogprobs,
    PromptProgress,
    Rates,
    Started,
    StepTokens,
    TokenRequest,
    TopLogprobs,
)
from ..outputs import Batch, CaptureReport, ModelInfo
from ..params import SamplingParams, ThinkingBudget
from ..pooling_params import PoolingParams
from ..structured_outputs import StructuredOutputs

# -- the engine's life


@message
class Setup:
    """The first word: what to load, and how to write the log."""

    config: EngineConfig
    log: Mapping[str, Any] | None
    first_step: int  # the trace goes on where the engine before was


@message
class Ready:
    """The model is loaded and the stages run."""

    info: ModelInfo
    seconds: Mapping[str, float]  # that each phase of the start took


@message
class NotStarted:
    """The engine can not start, and its process ends."""

    kind: str  # of the error: ConfigError, ModelError, or another's name
    reason: str


@message
class Stop:
    """Free everything and end."""


@message
class Broken:
    """A stage is beyond mending, and the process ends."""

    stage: str
    error: str  # its type


@message
class Crashed:
    """A stage raised, with these requests in hand; it goes on."""

    stage: str
    error: str
    stack: Sequence[str]
    request_ids: Sequence[str]


# -- requests


@message
class Gone:
    """These requests are over: what is still queued of them is dropped."""

    request_ids: Sequence[str]


@message
class Causes:
    """What the control lane says of sequences."""

    causes: Mapping[int, str]


@message
class RequestFailed:
    """A stage of the engine could not carry this request."""

    request_id: str
    kind: str  # of the error
    reason: str
    code: str
    param: str | None = None
    stage: str = ""

    @classmethod
    def of(cls, request_id: str, error: BaseException | None) -> RequestFailed:
        kind = type(error).__name__
        if isinstance(error, RequestError):
            return cls(request_id, kind, error.message, error.code, error.param)
        if isinstance(error, StageCrashed):
            return cls(request_id, kind, type(error.__cause__).__name__, error.code, stage=error.stage)
        return cls(request_id, kind, "", "internal_error")

    def error(self) -> Exception:
        """As the engine's stage would have raised it here."""
        if self.kind == "Refused":
            return Refused(self.reason, code=self.code, param=self.param)
        if self.kind == "StageCrashed":
            return StageCrashed(self.stage, self.code, engine_side_error(self.reason, ()))
        return Failed(self.reason or "internal error; the log has more", code=self.code, param=self.param)


class EngineSideError(Exception):
    """Stands for an error that the engine process has logged."""

    stack_elsewhere: Sequence[str] = ()


def engine_side_error(kind: str, stack: Sequence[str]) -> EngineSideError:
    """One of the same name, that came from there."""
    error: EngineSideError = type(kind, (EngineSideError,), {})()
    error.stack_elsewhere = stack
    return error


@message
class Served:
    """A stage of the engine had messages of these requests, for so many microseconds each."""

    stage: str
    times_us: Mapping[str, int]


@message
class Admitted:
    """These sequences were given slots."""

    sequence_ids: Sequence[int]


# -- questions


@message
class Ask:
    """To be answered with `Told` of the same number."""

    number: int
    what: str  # "books", "blocks", "forget_prefixes", "inject", "stacks"
    faults: Sequence[Fault] = ()


@message
class Told:
    """The answer; `error` says why there is none."""

    number: int
    value: Any = None
    error: str | None = None


# -- what the engine's books say


@message
class StageBooks:
    """One stage's counters; moments are of the clock that both processes share."""

    name: str
    idle: float
    busy: float
    blocked: float
    num_restarts: int
    num_dropped: int
    is_busy: bool
    last_progress_s: float
    busy_since_s: float
    blocked_on: str | None  # edge
    blocked_since_s: float
    expected_s: float
    waits_for: str | None
    has_work: bool
    unwanted_ports: Sequence[str]
    wants: Sequence[str]  # ports
    wait_us: Sequence[int]  # counts by bucket, then the sum
    service_us: Sequence[int]


@message
class EdgeBooks:
    """One channel's counters."""

    name: str
    stats: ChannelStats
    num_waiting: int
    waiting_since: float


@message
class PoolBooks:
    """Blocks of one memory, by state."""

    num_blocks: int
    num_free: int
    num_in_use: int
    num_shared: int
    num_cached: int
    num_quarantined: int


@message
class BlockBooks:
    """Which block is in which state, and whose: only told when somebody looks."""

    state: NDArray[np.int8]  # [N]
    num_tables: Ints  # [N]
    table_blocks: Ints  # [sum of num_blocks by slot] slot by slot, in token order


@message
class Books:
    """What observers see of the engine, all of one moment."""

    stages: Sequence[StageBooks]
    edges: Sequence[EdgeBooks]
    figures: Mapping[str, Any]  # of the scheduler, by their names there
    preemptions: Mapping[tuple[str, str], int]
    drafts: Mapping[str, Any]  # of its speculation
    sequences: Sequence[NDArray[Any]]  # columns: id, state, slot, num_prompt, limit, num_preempted, is_parked
    num_generated: NDArray[np.intp]  # [S]
    num_held: Ints  # [S] blocks of each slot
    waste: float  # share of the blocks' room
    pool: PoolBooks
    host_pool: PoolBooks | None
    swaps_refused: tuple[int, int]  # host full, or slower
    prefixes: tuple[int, int, int] | None  # tokens looked up, found, and found on the host
    step_tokens: Sequence[int]  # counts by bucket, then the sum
    idle_gaps: Sequence[int] | None  # likewise, of the device's; None where nobody knows them
    blocks: BlockBooks | None = None


CODEC = Codec(
    [
        *(TokenRequest, StepTokens, Started, TopLogprobs, Pooled, Begun, PromptLogprobs, PromptProgress),
        *(SamplingParams, CandidateParams, PoolingParams, StructuredOutputs, ThinkingBudget),
        *(Setup, Ready, NotStarted, Stop, Broken, Crashed, EngineConfig),
        *(ModelInfo, Rates, MemoryTable, MemoryRow, Machine, PoolingConfig, CaptureReport, Batch),
        *(Gone, Causes, RequestFailed, Served, Admitted, Ask, Told, Fault),
        *(Books, StageBooks, EdgeBooks, PoolBooks, BlockBooks, ChannelStats),
    ]
)
