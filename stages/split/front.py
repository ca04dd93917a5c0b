"""The front process's stages, and the views that stand for the step loop."""

from __future__ import annotations

from typing import Any, cast

from ...runtime.channel import Channel
from ...runtime.graph import Edge, Port
from ...runtime.pipeline import Pipeline
from ...runtime.stage import Stage
from ...runtime.stage_runner import StageRunner
from ..adapters.store import AdapterStore
from ..allocate.stage import Allocate
from ..config import EngineConfig
from ..engine.wiring import LoadedText, PortsOnly, TextStages
from ..execute.stage import Execute
from ..exit.outboxes import RequestOutbox
from ..grammar.compiled import Grammars
from ..pipeline import (
    ENTRY_CAPACITY,
    TEXT_CAPACITY,
    build_core_pipeline,
    build_front_pipeline,
)
from ..sample.stage import Sample
from ..schedule.stage import Schedule
from .inflight_requests import InflightRequests
from .remote_adapters import AdaptersThere
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
        requests: Any,
        tokens: Channel[Any],
    ) -> None:
        self.table, self.requests, self.tokens = table, requests, tokens
        super().__init__(config, loaded, grammars)

    def serve_adapters(self, config: EngineConfig, there: AdaptersThere) -> None:
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


def core_views(
    requests: Any, tokens: str, config: EngineConfig, now_s: float
) -> tuple[dict[str, RemoteRunnerView], dict[str, Any], list[Edge]]:
    """Views of an engine process's stages and channels, by name, and the edges between the stages.

    `requests` is the channel to it, `tokens` the name of the one from it.
    """
    loop = build_core_pipeline(*map(PortsOnly, CORE.values()), steps_in_flight=config.steps_in_flight)
    channels: dict[str, Any] = {edge.name: RemoteChannelView(edge.name, edge.capacity or 0) for edge in loop.edges}
    inputs: dict[str, dict[str, Any]] = {name: {} for name in CORE}
    for edge in loop.edges:
        inputs[edge.target.stage][edge.target.port] = channels[edge.name]
    inputs["schedule"]["in"] = requests
    channels[tokens] = RemoteChannelView(tokens, TEXT_CAPACITY)
    mirrors = {
        name: RemoteRunnerView(name, RemoteStageView(kind), {port: inputs[name][port] for port in kind.inputs}, now_s)
        for name, kind in CORE.items()
    }
    return mirrors, channels, loop.edges


def show_core(parts: FrontStages, requests: Any, tokens: str, config: EngineConfig, now_s: float) -> RemoteCoreView:
    """Adds views of the engine process's stages and channels to a running pipeline.

    They are in the order of the data flow, before the stage that gets their tokens. Observers then see all seven
    stages. Returns the `RemoteCoreView` that updates the views. `requests` and `tokens` are as for `core_views`.
    """
    pipeline = parts.pipeline
    mirrors, channels, loop = core_views(requests, tokens, config, now_s)
    to_loop, from_loop = reach = _reaching_edges(requests.name, tokens, pipeline)
    stages, runners, own = list(pipeline.stages), dict(pipeline.runners), dict(pipeline.channels)
    order = [one for name in stages for one in ((*CORE, name) if name == from_loop.target.stage else (name,))]
    shown = cast("dict[str, StageRunner]", {name: runners.get(name) or mirrors.get(name) for name in order})
    pipeline.runners.clear()
    pipeline.runners.update(shown)
    pipeline.stages = {name: runner.stage for name, runner in shown.items()}
    edges = [*loop, *pipeline.edges, *reach]
    places = {name: place for place, name in enumerate(order)}
    pipeline.edges = sorted(edges, key=lambda edge: places[edge.source.stage])
    all_channels: dict[str, Any] = {to_loop.name: requests} | own | channels
    if requests.name != to_loop.name:  # between stages of one's own
        all_channels.pop(requests.name, None)
    all_channels[from_loop.name] = all_channels.pop(tokens)
    flow = {edge.name: place for place, edge in enumerate(pipeline.edges)}
    pipeline.channels = dict(sorted(all_channels.items(), key=lambda pair: flow.get(pair[0], -1)))
    return RemoteCoreView(config, parts.loaded.info, mirrors, pipeline.channels | channels, parts.table.request_id)


def _reaching_edges(requests: str, tokens: str, pipeline: Pipeline) -> tuple[Edge, Edge]:
    """The edges to the step loop and from it; a stage of one's own may have the open end of the pipeline."""
    (a, b), (c, d) = requests.split("->"), tokens.split("->")
    source, target = _port(a), _port(d)
    for port in pipeline.open_ports:
        if port.port in pipeline.stages[port.stage].outputs:
            source = port
        else:
            target = port
    return (
        Edge(source, _port(b), ENTRY_CAPACITY, "wait", "a burst of prompts tokenized at once"),
        Edge(_port(c), target, TEXT_CAPACITY, "wait", "steps that wait to become text"),
    )


def _port(text: str) -> Port:
    stage, _, port = text.partition(".")
    return Port(stage, port)
