"""The front process's stages, and the status of these and the step loop as of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...runtime.channel import Channel
from ...runtime.graph import Edge, Port
from ...runtime.pipeline import Pipeline
from ...runtime.pipeline_status import ChannelStatus, PipelineStatus, StageStatus
from ...runtime.stage import Stage
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
    TO_SCHEDULE,
    build_core_pipeline,
    build_front_pipeline,
)
from ..sample.stage import Sample
from ..schedule.stage import Schedule
from .inflight_requests import InflightRequests
from .remote_adapters import AdaptersThere

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


class JoinedPipeline:
    """Joins the status of the front process's pipeline and that of the step loop to one of all seven stages.

    They are in the order of the data flow, the loop before the stage that gets its tokens. `requests` and `tokens` name
    the channels between the two.
    """

    def __init__(self, pipeline: Pipeline, requests: str, tokens: str, steps_in_flight: int) -> None:
        loop = build_core_pipeline(*map(PortsOnly, CORE.values()), steps_in_flight=steps_in_flight).edges
        to_loop, from_loop = reach = _reaching_edges(requests, tokens, pipeline)
        places = [one for name in pipeline.stages for one in (*(CORE if name == from_loop.target.stage else ()), name)]
        self._order = {name: place for place, name in enumerate(places)}
        edges = [*loop, *pipeline.edges, *reach]
        self._edges = tuple(sorted(edges, key=lambda edge: self._order[edge.source.stage]))
        self._flow = {edge.name: place for place, edge in enumerate(self._edges)}
        self._reported = {*(edge.name for edge in loop), tokens}  # the others this process counts by itself
        # a stage of one's own may be between the channels and their stages
        names = {requests: to_loop.name, "->".join(TO_SCHEDULE): to_loop.name, tokens: from_loop.name}
        self._names = {name: there for name, there in names.items() if name != there}

    def join(
        self, own: PipelineStatus, stages: Sequence[StageStatus], channels: Sequence[ChannelStatus]
    ) -> PipelineStatus:
        """The status of all; `stages` and `channels` are of the step loop."""
        known = {**own.stages, **{stage.name: stage for stage in stages}}
        joint = {**own.channels} | {channel.name: channel for channel in channels if channel.name in self._reported}
        for name in self._names.keys() & joint.keys():
            channel = replace(joint.pop(name), name=self._names[name])
            joint[channel.name] = channel
        flow = sorted(joint.items(), key=lambda pair: self._flow.get(pair[0], -1))
        return PipelineStatus(
            {name: self._renamed(known[name]) for name in self._order if name in known}, dict(flow), self._edges
        )

    def _renamed(self, stage: StageStatus) -> StageStatus:
        """The stage, with the channels' names of the joint pipeline."""
        names = self._names
        if names.keys().isdisjoint({*stage.inputs.values(), stage.blocked_on}):
            return stage
        inputs = {port: names.get(name, name) for port, name in stage.inputs.items()}
        blocked_on = stage.blocked_on and names.get(stage.blocked_on, stage.blocked_on)
        return replace(stage, inputs=inputs, blocked_on=blocked_on)


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
