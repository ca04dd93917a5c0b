"""The front process's stages, and the views that stand for the step loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ...runtime.graph import Edge, Port
from ...runtime.pipeline import Pipeline
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.wire import WireError
from ...runtime.stage import Stage
from ...runtime.stage_runner import StageRunner
from ..adapters.store import AdapterStore
from ..allocate.stage import Allocate
from ..config import EngineConfig
from ..engine.wiring import LoadedText, TextStages
from ..execute.stage import Execute
from ..exit.outboxes import RequestOutbox
from ..grammar.compiled import Grammars
from ..messages import StepTokens, TokenRequest
from ..pipeline import (
    ENTRY_CAPACITY,
    TEXT_CAPACITY,
    TO_DETOKENIZE,
    TO_SCHEDULE,
    build_core_pipeline,
    build_front_pipeline,
)
from ..sample.stage import Sample
from ..schedule.stage import Schedule
from .inflight_requests import InflightRequests
from .remote_adapters import RemoteAdapters
from .remote_views import RemoteChannelView, RemoteCoreView, RemoteRunnerView, RemoteStageView

CORE: dict[str, type[Stage[Any, Any]]] = {
    "schedule": Schedule,
    "allocate": Allocate,
    "execute": Execute,
    "sample": Sample,
}


class TriedGrammars(Grammars):
    """The grammars of the front process: tried and counted here, compiled in the engine process."""

    def compile(self, structured: Any) -> Any:
        """Does nothing: a grammar that passed its trial compiles."""


class FrontStages(TextStages):
    """The joined stages of the front process.

    `requests` and `tokens` connect it to the engine process.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedText,
        grammars: Grammars,
        table: InflightRequests,
        requests: OutboundChannel[TokenRequest],
        tokens: InboundChannel[StepTokens],
    ) -> None:
        self.table, self.requests, self.tokens = table, requests, tokens
        super().__init__(config, loaded, grammars)

    def serve_adapters(self, config: EngineConfig, there: RemoteAdapters) -> None:
        """Admits requests with the adapters of the settings, which the engine process reads and holds.

        An adapter without requests may be dropped while it has a device slot: the engine process knows, and waits.
        """
        sizes = (config.num_host_loras, lambda digest: False, there.drop, config.lora_host_bytes, config.max_loras)
        self._serve_adapters(config, AdapterStore(*sizes), there)

    def _make_pipeline(self) -> Pipeline:
        pipeline = build_front_pipeline(self.intake, self.tokenize, self.detokenize, self.exit)
        pipeline.give_channel("tokenize.out", self.requests)
        pipeline.give_channel("detokenize.in", self.tokens, is_watched=False)
        return pipeline

    def _stage_of(self, outbox: RequestOutbox) -> tuple[str, bool]:
        request = outbox.request
        if outbox.request_id in self.searches:
            return "execute", True
        if outbox.request_id not in self.table:
            return ("detokenize", True) if outbox.has_started else ("tokenize", False)
        ids = range(request.first_sequence_id, request.first_sequence_id + request.num_sequences)
        if self.table.is_admitted(ids):
            return "execute", True
        return "schedule", outbox.has_started


def make_ends(
    table: InflightRequests, refused: Callable[[TokenRequest, WireError], object]
) -> tuple[OutboundChannel[TokenRequest], InboundChannel[StepTokens]]:
    """The front process's halves of the two channels between the processes."""
    requests: OutboundChannel[TokenRequest] = OutboundChannel(
        "->".join(TO_SCHEDULE), ENTRY_CAPACITY, on_send=table.sent, on_refused=refused
    )
    tokens: InboundChannel[StepTokens] = InboundChannel("->".join(TO_DETOKENIZE), TEXT_CAPACITY, on_arrival=table.note)
    return requests, tokens


def show_core(parts: FrontStages, config: EngineConfig, now_s: float) -> RemoteCoreView:
    """Adds views of the engine process's stages and channels to a running pipeline.

    They are in the order of the data flow. Observers then see all seven stages. Returns the `RemoteCoreView` that
    updates the views.
    """
    pipeline = parts.pipeline
    loop = build_core_pipeline(*map(_Ports, CORE.values()), steps_in_flight=config.steps_in_flight)
    reach = {edge.name: edge for edge in _reaching_edges()}
    channels = {
        edge.name: RemoteChannelView(edge.name, edge.capacity or 0) for edge in (*loop.edges, reach[parts.tokens.name])
    }
    inputs: dict[str, dict[str, Any]] = {name: {} for name in CORE}
    for edge in loop.edges:
        inputs[edge.target.stage][edge.target.port] = channels[edge.name]
    inputs["schedule"]["in"] = parts.requests
    mirrors = {
        name: RemoteRunnerView(name, RemoteStageView(kind), {port: inputs[name][port] for port in kind.inputs}, now_s)
        for name, kind in CORE.items()
    }
    stages, runners, own = list(pipeline.stages), dict(pipeline.runners), dict(pipeline.channels)
    order = [one for name in stages for one in ((*CORE, name) if name == "detokenize" else (name,))]
    shown = cast("dict[str, StageRunner]", {name: runners.get(name) or mirrors.get(name) for name in order})
    pipeline.runners.clear()
    pipeline.runners.update(shown)
    pipeline.stages = {name: runner.stage for name, runner in shown.items()}
    edges = [*loop.edges, *pipeline.edges, *reach.values()]
    places = {name: place for place, name in enumerate(order)}
    pipeline.edges = sorted(edges, key=lambda edge: places[edge.source.stage])
    all_channels: dict[str, Any] = own | channels
    flow = {edge.name: place for place, edge in enumerate(pipeline.edges)}
    pipeline.channels = dict(sorted(all_channels.items(), key=lambda pair: flow.get(pair[0], -1)))
    return RemoteCoreView(config, parts.loaded.info, mirrors, pipeline.channels, parts.table.request_id)


def _reaching_edges() -> list[Edge]:
    (a, b), (c, d) = TO_SCHEDULE, TO_DETOKENIZE
    return [
        Edge(_port(a), _port(b), ENTRY_CAPACITY, "wait", "a burst of prompts tokenized at once"),
        Edge(_port(c), _port(d), TEXT_CAPACITY, "wait", "steps that wait to become text"),
    ]


def _port(text: str) -> Port:
    stage, _, port = text.partition(".")
    return Port(stage, port)


class _Ports(RemoteStageView):
    """A stage of which only the ports are used."""
