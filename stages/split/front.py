"""The front process's stages."""

from __future__ import annotations

from typing import Any

from ...runtime.channel import Channel
from ...runtime.joined_status import JoinedPipeline
from ...runtime.pipeline import Pipeline
from ..adapters.store import AdapterStore
from ..config import EngineConfig
from ..engine.wiring import CLASSES, LoadedText, PortsOnly, TextStages
from ..exit.outboxes import RequestOutbox
from ..grammar.compiled import Grammars
from ..pipeline import (
    TO_SCHEDULE,
    build_core_pipeline,
    build_front_pipeline,
    edges_to_loop,
)
from .inflight_requests import InflightRequests
from .remote_adapters import AdaptersThere

CORE = {name: CLASSES[name] for name in ("schedule", "allocate", "execute", "sample")}  # the stages of the step loop


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


def join_with_loop(pipeline: Pipeline, to_loop: tuple[str, str], tokens: str, steps_in_flight: int) -> JoinedPipeline:
    """The pipeline and the step loop as one. `to_loop` and `tokens` are the channels between the two."""
    requests = "->".join(to_loop)
    loop = build_core_pipeline(*map(PortsOnly, CORE.values()), steps_in_flight=steps_in_flight).edges
    edges = edges_to_loop(pipeline, requests, tokens)
    return JoinedPipeline(pipeline, CORE, loop, edges, (requests, "->".join(TO_SCHEDULE)), tokens)
