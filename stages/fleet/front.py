"""The stages of a front process with several engine processes, and what observers see of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from ...runtime.channel import ChannelStats
from ...runtime.pipeline import Pipeline
from ...runtime.pipeline_status import ChannelStatus
from ..config import EngineConfig
from ..engine.wiring import LoadedText
from ..grammar.compiled import Grammars
from ..pipeline import TEXT_CAPACITY, TO_CORES, TO_MERGE, build_fleet_pipeline
from ..split.engine_core import EngineCore
from ..split.front import FrontStages
from .core_set import CoreSet
from .fleet_requests import FleetRequests
from .merged_channel import MergedChannel
from .stage import Dispatch, Merge
from .traffic.shadow_copies import ShadowCopies

DISPATCHED = "->".join(TO_CORES)  # the channels to the engine processes, as one


class FleetStages(FrontStages):
    """The joined stages of a front process with several engine processes. Each has the slots of `config`."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedText,
        grammars: Grammars,
        table: FleetRequests,
        cores: CoreSet,
        merged: MergedChannel,
        on_answer: Callable[[int], object] = int,
        copies: ShadowCopies | None = None,
    ) -> None:
        self.dispatch, self.merge = Dispatch(cores), Merge(config.max_num_seqs, on_answer, copies)
        super().__init__(joint_config(config), loaded, grammars, table, None, merged)

    def _make_pipeline(self) -> Pipeline:
        stages = (self.intake, self.tokenize, self.dispatch, self.merge, self.detokenize, self.exit)
        pipeline = build_fleet_pipeline(*stages)
        pipeline.give_channel("merge.in", self.tokens)
        return pipeline


def joint_config(config: EngineConfig) -> EngineConfig:
    """The settings as those of one engine with the slots of all engine processes."""
    count = config.data_parallel_size
    return replace(
        config,
        max_num_seqs=count * config.max_num_seqs,
        max_num_batched_tokens=None,
        max_loras=count * config.max_loras,
        max_cpu_loras=None if config.max_cpu_loras is None else count * config.max_cpu_loras,
    )


def make_merged(count: int, clock: Callable[[], float]) -> MergedChannel:
    """The channel for the steps of `count` engine processes."""
    return MergedChannel("->".join(TO_MERGE), count * TEXT_CAPACITY, clock)


def dispatched_status(cores: Sequence[EngineCore]) -> ChannelStatus:
    """All channels to the engine processes, as one. No sender waits: dispatch waits for all of them at once."""
    channels = [core.requests for core in cores]
    stats = [channel.stats() for channel in channels]
    joint = ChannelStats(*(sum(getattr(one, field.name) for one in stats) for field in fields(ChannelStats)))
    since = min((channel.waiting_since for channel in channels if len(channel)), default=math.inf)
    return ChannelStatus(DISPATCHED, joint, 0, since)
