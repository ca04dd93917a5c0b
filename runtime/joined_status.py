"""The status of a pipeline and of a loop of stages in another process, as of one pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .graph import Edge
from .pipeline import Pipeline
from .pipeline_status import ChannelStatus, PipelineStatus, StageStatus


class JoinedPipeline:
    """Joins the status of `pipeline` with that of the stages `names` elsewhere, which `loop` connects.

    They are in the order of the data flow, the loop before the stage that gets its items. `reach` are the edges to the
    loop and from it; `requests` are the names of the first one's channel here and there, and `items` that of the other.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        names: Iterable[str],
        loop: Sequence[Edge],
        reach: tuple[Edge, Edge],
        requests: tuple[str, str],
        items: str,
    ) -> None:
        to_loop, from_loop = reach
        places = [one for name in pipeline.stages for one in (*(names if name == from_loop.target.stage else ()), name)]
        self._order = {name: place for place, name in enumerate(places)}
        edges = [*loop, *pipeline.edges, *reach]
        self._edges = tuple(sorted(edges, key=lambda edge: self._order[edge.source.stage]))
        self._flow = {edge.name: place for place, edge in enumerate(self._edges)}
        self._reported = {*(edge.name for edge in loop), items}  # the others this process counts by itself
        # a stage of one's own may be between the channels and their stages
        there = {**dict.fromkeys(requests, to_loop.name), items: from_loop.name}
        self._names = {name: joint for name, joint in there.items() if name != joint}

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
