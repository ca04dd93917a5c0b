"""The messages between the supervisor and its children, over a link to each.

FrontSetup, FleetStates, MetricsWanted, MetricsSum, LoadingState, EndProcess   supervisor -> front
FrontReady, StartFailed, MetricsTaken, MetricsAsked, EngineStuck          front -> supervisor
TrafficSettings                                                           front -> supervisor -> fronts
CoreSetup, EndProcess                                                          supervisor -> core
CoreReady, CoreLoading, StartFailed                                       core -> supervisor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.message import message
from ...runtime.processes.wire import Codec
from ...runtime.startup.load_progress import LoadState
from ...stages.config import EngineConfig
from ...stages.traffic.traffic_rules import TrafficRules
from ..config import ServerConfig

LINK_TIMEOUT_S = 30.0  # without a sign of life of the other end: a child that hangs is replaced


@message
class TrafficSettings:
    """What goes by the labels of engines, in the form of flags: told to all fronts, or to those of a model."""

    split: str | None = None
    shadow: str | None = None
    model: str | None = None  # of several; None: it is of all


def traffic_of(settings: TrafficSettings) -> TrafficRules:
    """What a front follows. Raises `ConfigError`."""
    return TrafficRules.parse(settings.split, settings.shadow)


def settings_of(rules: TrafficRules, model: str | None = None) -> TrafficSettings:
    """How it is told to other fronts."""
    split, shadow = (None if share is None else str(share) for share in rules.shares)
    return TrafficSettings(split, shadow, model)


@message
class FrontSetup:
    """The first message to a front."""

    number: int  # of the front, from 0 on
    folder: str  # of the Unix sockets of all fronts and engines
    engine_config: EngineConfig
    server_config: ServerConfig  # with the port that the supervisor holds
    sources: Mapping[str, str]  # setting -> where its value came from
    engines: Sequence[str]  # their addresses, as of `--engine`
    fleet_key_file: str | None
    fleet_tls: Sequence[str]  # paths of certificate, key and authorities; (): links are not encrypted
    prefix_key: bytes | None  # what the engines name their blocks by; None: as the fleet's key says
    created: int  # Unix time of the server's start, the same in all fronts
    traffic: TrafficSettings
    model: str  # that its engines must serve, of several; "": any
    is_successor: bool  # of a front that has ended: it listens once it is ready, as others take the connections


@message
class CoreSetup:
    """The first message to an engine process."""

    index: int
    config: EngineConfig
    num_engines: int  # that share the memory of this machine
    cpus: Sequence[int]  # that the process may run on; (): all
    log: Mapping[str, Any] | None
    path: str  # of the Unix socket for fronts
    folder: str
    prefix_key: bytes
    shutdown_timeout_s: float
    link_timeout_s: float


@message
class EndProcess:
    """Ends the process: a front after its drain, an engine after that of its requests."""


@message
class StartFailed:
    """The process cannot start, and ends."""

    kind: str  # name of the error type: ConfigError, ModelError, or another
    reason: str


@message
class FrontReady:
    """The front takes requests."""

    models: Sequence[str]
    model_impl: str


@message
class CoreReady:
    """The engine takes fronts."""


@message
class CoreLoading:
    """How far the engine is with loading the model."""

    state: LoadState


@message
class LoadingState:
    """How far the engines are with loading, for a front that waits for them."""

    state: LoadState


@message
class FrontState:
    """What the supervisor knows of one front."""

    number: int
    pid: int  # 0: none
    state: str  # "loading", "ready" or "stopped"
    reason: str | None  # why it takes no requests; None if it does
    num_restarts: int
    models: Sequence[str] = ()  # that it serves, where fronts have different ones


@message
class FleetStates:
    """All fronts, sent when one changes."""

    fronts: Sequence[FrontState]
    has_engines: bool  # all have been ready once


@message
class MetricsWanted:
    """Asks a front for its metrics, which it also sends each second if they have changed."""

    number: int


@message
class MetricsTaken:
    """The metrics of one front: JSON as `front_metrics.py` makes it. `number`: of the question; -1: none."""

    number: int
    data: bytes


@message
class MetricsAsked:
    """A front asks for the metrics of all."""

    number: int


@message
class MetricsSum:
    """The answer: those of all fronts by number, and the counters of processes that have ended."""

    number: int
    fronts: Mapping[int, bytes]
    ended: bytes


@message
class EngineStuck:
    """A front has seen that an engine makes no progress, or gives no sign of life."""

    index: int


CODEC = Codec(
    [
        *(FrontSetup, CoreSetup, EndProcess, StartFailed, FrontReady, CoreReady, CoreLoading, LoadingState),
        *(FrontState, FleetStates, MetricsWanted, MetricsTaken, MetricsAsked, MetricsSum, EngineStuck),
        *(EngineConfig, ServerConfig, LoadState, TrafficSettings),
    ]
)
