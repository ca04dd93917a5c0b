"""The status of what an engine has in this process wherever its step loop runs: admission, adapters, grammars, gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.pipeline_status import HistogramStatus
from ..adapters.gate import AdapterGate
from ..grammar.compiled import Grammars
from ..intake.admission import Admission
from .wiring import JoinedStages


@dataclass(frozen=True, slots=True)
class AdmissionStatus:
    """The requests that intake has admitted."""

    num_admitted: int  # waiting ones included
    num_waiting: int  # for their first token
    work_waiting_s: float  # estimated
    estimated_wait_s: float  # at least 1 s

    @classmethod
    def of(cls, admission: Admission) -> AdmissionStatus:
        counts = (admission.num_admitted, admission.num_waiting)
        return cls(*counts, admission.work_waiting_s(), admission.estimate_wait_s())


@dataclass(frozen=True, slots=True)
class GrammarsStatus:
    """The compiled grammars."""

    num_grammars: int
    max_grammars: int
    num_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, grammars: Grammars) -> GrammarsStatus:
        return cls(len(grammars), grammars.max_grammars, grammars.num_bytes, grammars.max_bytes)


@dataclass(frozen=True, slots=True)
class HostAdaptersStatus:
    """The LoRA adapters in host memory, of this or of the engine processes, and the requests that have one."""

    num_users: Mapping[str, int]  # requests in progress, by the digest of each adapter that is there
    digests: Mapping[str, str]  # by request id, of requests whose adapter is there
    waiting: Mapping[str, int]  # requests that wait for their adapter, by its name
    num_bytes: int
    num_loads: int
    load_seconds: float
    num_evicted: int

    @classmethod
    def of(cls, gate: AdapterGate) -> HostAdaptersStatus:
        store, loader = gate.store, gate.loader
        num_users = {digest: store.num_users(digest) for digest in store.digests()}
        counts = (store.num_bytes, loader.num_loads, loader.load_seconds, store.num_evicted)
        return cls(num_users, gate.digests(), dict(gate.waiting), *counts)


@dataclass(frozen=True, slots=True)
class FrontStatus:
    """The part of `EngineStatus` that needs no step loop."""

    admission: AdmissionStatus
    grammars: GrammarsStatus | None  # None: an encoder model
    token_gaps_us: HistogramStatus | None  # between two tokens of an answer; None: an encoder model
    adapters: HostAdaptersStatus | None  # None: none are served


def read_front(stages: JoinedStages) -> FrontStatus:
    """The current status."""
    admission, text = AdmissionStatus.of(stages.intake.admission), stages.text
    if text is None:
        return FrontStatus(admission, None, None, None)
    return FrontStatus(
        admission,
        GrammarsStatus.of(text.grammars),
        HistogramStatus.of(text.detokenize.gaps.histogram),
        None if text.adapters is None else HostAdaptersStatus.of(text.adapters),
    )
