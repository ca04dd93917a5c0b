"""Stages of one's own with their places in the pipeline: from settings, checked before a model is loaded.

    --stage my_package.stages:Redactor@after=detokenize,mask=***

names a class, a function that makes a stage, or a function that is one (`@stage`). A target that needs several stages
returns a list of `PlacedStage`, and is named without a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...runtime.graph import GraphError, Port
from ...runtime.pipeline import Pipeline
from ...runtime.stage import FunctionStage, Stage
from ..errors import ConfigError
from ..plugins import NAME, PluginSpec, find_plugin, make_plugin, near_miss, parse_plugins

GROUP = "millrace.stages"  # of entry points


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage of one's own, and its place: after or before another stage of the pipeline."""

    stage: Stage[Any, Any]
    after: str | None = None
    before: str | None = None
    name: str | None = None  # in the pipeline, the metrics and traces; None: the stage's own name
    text: str = ""  # the setting, for errors

    @property
    def title(self) -> str:
        """Its name in the pipeline."""
        return self.name or self.stage.name

    @property
    def place(self) -> str:
        """As a setting writes it; empty if it has none."""
        if self.after is None and self.before is None:
            return ""
        return f"after={self.after}" if self.after is not None else f"before={self.before}"


def load_stages(settings: Sequence[str]) -> list[PlacedStage]:
    """The stages that the setting `stage` names. Imports and makes them. Raises `ConfigError`."""
    return [placed for spec in parse_plugins("stage", settings) for placed in _load(spec)]


def _load(spec: PluginSpec) -> list[PlacedStage]:
    where, found = f"stage = {spec.text}", find_plugin("stage", spec.target, GROUP)
    if isinstance(found, FunctionStage) and not spec.arguments:
        made: Any = found
    elif isinstance(found, Stage):
        raise ConfigError(f"{where}: {spec.target} is one stage that was made already: name its class")
    elif not callable(found):
        raise ConfigError(f"{where}: {spec.target} is {found!r:.64}: must be a class of a stage, or make one")
    elif isinstance(found, type) and not issubclass(found, Stage):
        base = "millrace.Stage"
        raise ConfigError(f"{where}: {spec.target} is not a stage: must be a subclass of {base}, or make one")
    else:
        made = make_plugin("stage", spec, found)
    if isinstance(made, Stage):
        return [PlacedStage(made, spec.after, spec.before, spec.name, spec.text)]
    if not isinstance(made, list) or not all(isinstance(one, PlacedStage) for one in made):
        kind = type(made).__name__
        raise ConfigError(f"{where}: {spec.target} made a {kind}: must make a stage, or a list of PlacedStage")
    if spec.after is not None or spec.before is not None or spec.name is not None:
        raise ConfigError(
            f"{where}: {spec.target} makes {len(made)} stages with places of their own: leave out @ and name"
        )
    return [replace(one, text=spec.text) for one in made]


def in_order(stages: Sequence[PlacedStage]) -> list[PlacedStage]:
    """The stages with places such that those after one stage are there in their order, when inserted one by one."""
    last: dict[str, str] = {}  # place -> the last stage there
    found = []
    for placed in stages:
        if placed.after is not None:
            after, last[placed.after] = last.get(placed.after, placed.after), placed.title
            placed = replace(placed, after=after)
        found.append(placed)
    return found


def check_places(stages: Sequence[PlacedStage], pipelines: Sequence[Pipeline]) -> None:
    """Raises `ConfigError` for the first stage that does not fit, if each of the pipelines has one.

    The pipelines stay as they are. Their stages need only have ports. Errors name the places of the last one.
    """
    wrong: ConfigError | None = None
    taken = {name for pipeline in pipelines for name in pipeline.stages}
    for pipeline in pipelines:
        try:
            return _check(stages, pipeline, set(taken))
        except ConfigError as error:
            wrong = error
    assert wrong is not None, "there is a pipeline"
    raise wrong


def _check(stages: Sequence[PlacedStage], pipeline: Pipeline, taken: set[str]) -> None:
    pipeline = _copy(pipeline)
    for placed in in_order(stages):
        where = f"stage = {placed.text or placed.title}"
        if not NAME.fullmatch(placed.title):
            message = f"{where}: its name is {placed.title!r}: must be letters, digits and _; add ,name=NAME"
            raise ConfigError(message)
        if placed.title in taken:
            raise ConfigError(f"{where}: there is a stage {placed.title} already; add ,name=NAME with another one")
        taken.add(placed.title)
        if not placed.place:
            raise ConfigError(f"{where}: has no place; add @after=STAGE: the stage fits {_fitting(placed, pipeline)}")
        place = (placed.after or placed.before or "").partition(".")[0]
        if place not in pipeline.stages:
            fits = _fitting(placed, pipeline)
            message = f"{where}: there is no stage {place}{near_miss(place, pipeline.stages)}"
            raise ConfigError(f"{message}: the stage fits {fits}")
        try:
            _insert(placed, pipeline)
            pipeline.check()
        except GraphError as error:
            before = _copy(pipeline, without=placed.title)
            raise ConfigError(f"{where}: {error}. The stage fits {_fitting(placed, before)}") from None


def _insert(placed: PlacedStage, pipeline: Pipeline) -> None:
    pipeline.insert(placed.stage, placed.after, before=placed.before, name=placed.name)


def _copy(pipeline: Pipeline, without: str | None = None) -> Pipeline:
    """The same stages and edges; without a stage that was inserted, they are as before."""
    made = Pipeline()
    made.stages = {name: stage for name, stage in pipeline.stages.items() if name != without}
    made.edges, made.entry, made.open_ports = list(pipeline.edges), pipeline.entry, set(pipeline.open_ports)
    if without is None or without not in pipeline.stages:
        return made
    into = [edge for edge in made.edges if edge.target == Port(without, "in")]
    out = [edge for edge in made.edges if edge.source == Port(without, "out")]
    made.edges = [edge for edge in made.edges if edge not in (*into, *out)]
    made.edges += [replace(a, target=b.target) for a in into for b in out]
    ends = {Port(without, "out"): into and into[0].source, Port(without, "in"): out and out[0].target}
    made.open_ports = {ends.get(port) or port for port in made.open_ports}
    return made


def _fitting(placed: PlacedStage, pipeline: Pipeline) -> str:
    """The places where a stage fits, for an error."""
    places = [f"after={name}" for name in pipeline.stages if _fits(replace(placed, after=name, before=None), pipeline)]
    for port in pipeline.open_ports:
        has_input = port.port in pipeline.stages[port.stage].inputs
        if has_input and _fits(replace(placed, after=None, before=port.stage), pipeline):
            places.append(f"before={port.stage}")
    kinds = f"it takes {_kind(placed.stage.inputs)} and makes {_kind(placed.stage.outputs)}"
    return f"{' or '.join(places)}; {kinds}" if places else f"nowhere, as {kinds}"


def _fits(placed: PlacedStage, pipeline: Pipeline) -> bool:
    trial = _copy(pipeline)
    try:
        _insert(placed, trial)
        trial.check()
    except GraphError:
        return False
    return True


def _kind(ports: Any) -> str:
    kinds = [getattr(kind, "__name__", str(kind)) for kind in ports.values()]
    return ", ".join(kinds) or "nothing"
