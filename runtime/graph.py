"""The declaration of a pipeline: stages, ports and edges, and checks without an event loop."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .stage import Stage

OPEN_END_CAPACITY = 64  # of a channel at an open end: of one that the caller feeds or drains


class GraphError(ValueError):
    """The graph cannot run. The message names the ports and the fix."""


@dataclass(frozen=True, slots=True)
class Port:
    """One end of an edge, written `stage.port`."""

    stage: str
    port: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.port}"


@dataclass(frozen=True, slots=True)
class Edge:
    """A declared channel, from an output port to an input port.

    `when_full` is "wait" (back-pressure) or "never": credits keep it from filling. `credits` is the most items that can
    be on it at once.
    """

    source: Port
    target: Port
    capacity: int | None
    when_full: Literal["wait", "never"] | None
    reason: str  # for the capacity; shown with the graph
    credits: int | None = None

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"


class Graph:
    """Stages by name, in the order of the flow, and the edges between them."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage[Any, Any]] = {}
        self.edges: list[Edge] = []
        self.entry: Port | None = None  # where requests enter; the only input that may be unconnected
        self.open_ports: set[Port] = set()  # ends that a slice left open on purpose

    # -- declaring

    def add(self, stage: Stage[Any, Any], name: str | None = None) -> str:
        """Adds an unconnected stage. Returns its name."""
        name = name or stage.name
        if name in self.stages:
            raise GraphError(f"two stages are called {name}: give one of them another name")
        self.stages[name] = stage
        return name

    def connect(
        self,
        source: str,
        target: str,
        *,
        capacity: int | None = None,
        when_full: Literal["wait", "never"] | None = "wait",
        reason: str = "",
        credits: int | None = None,
    ) -> None:
        """Adds an edge. `source` and `target` are `stage` (its port `out` or `in`) or `stage.port`."""
        edge = Edge(_port(source, "out"), _port(target, "in"), capacity, when_full, reason, credits)
        self._require_port(edge.source, "outputs")
        self._require_port(edge.target, "inputs")
        self.edges.append(edge)

    def insert(
        self,
        stage: Stage[Any, Any],
        after: str | None = None,
        *,
        before: str | None = None,
        name: str | None = None,
        capacity: int | None = None,
    ) -> str:
        """Inserts a stage on the edge that leaves `after`, or on the one that reaches `before`.

        Each is `stage` or `stage.port`. Both halves keep the edge's settings. At an open end, the new stage has the
        open end.
        """
        if (after is None) == (before is None):
            raise GraphError("insert: name one place, after= or before= a stage")
        _require_port_of(name or stage.name, stage, "in", "inputs")
        _require_port_of(name or stage.name, stage, "out", "outputs")
        port = _port(after, "out") if after is not None else _port(before or "", "in")
        self._require_port(port, "outputs" if after is not None else "inputs")
        edge = next((edge for edge in self.edges if port in (edge.source, edge.target)), None)
        if edge is None:
            return self._insert_at_open_end(stage, port, name, capacity, is_output=after is not None)
        name = self.add(stage, name)
        first = replace(edge, target=Port(name, "in"), capacity=capacity or edge.capacity)
        second = replace(edge, source=Port(name, "out"))
        at = self.edges.index(edge)
        self.edges[at : at + 1] = [first, second]
        self._move_behind(name, edge.source.stage)
        return name

    def _insert_at_open_end(
        self, stage: Stage[Any, Any], port: Port, name: str | None, capacity: int | None, *, is_output: bool
    ) -> str:
        if port not in self.open_ports:
            far = "nothing follows" if is_output else "nothing comes before"
            raise GraphError(f"{far} {port}: connect it first, or insert at another port")
        name = self.add(stage, name)
        own = Port(name, "out" if is_output else "in")
        ends = (port, Port(name, "in")) if is_output else (Port(name, "out"), port)
        self.edges.append(Edge(*ends, capacity or OPEN_END_CAPACITY, "wait", "slack beside an open end"))
        names = [None, *self.stages]
        self._move_behind(name, port.stage if is_output else names[names.index(port.stage) - 1])
        self._move_open_end(port, own)
        return name

    def _move_open_end(self, old: Port, new: Port) -> None:
        """Makes `new` the open end that `old` was."""
        self.open_ports = {new if port == old else port for port in self.open_ports}

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """Replaces the stage called `name`.

        The new stage must have the ports that are connected there.
        """
        self._require_stage(name)
        for edge in self.edges:
            if edge.source.stage == name:
                _require_port_of(name, stage, edge.source.port, "outputs")
            if edge.target.stage == name:
                _require_port_of(name, stage, edge.target.port, "inputs")
        self.stages[name] = stage

    def cut(self, first: str, last: str) -> Graph:
        """The stages from `first` to `last` in flow order, with the edges among them.

        Cut ends stay open; requests enter at the first stage's main input.
        """
        names = list(self.stages)
        self._require_stage(first)
        self._require_stage(last)
        kept = names[names.index(first) : names.index(last) + 1]
        if not kept:
            raise GraphError(f"slice({first}, {last}): {last} comes before {first}; the order is {' -> '.join(names)}")
        part = type(self)()
        part.stages = {name: self.stages[name] for name in kept}
        inside = set(kept)
        for edge in self.edges:
            if edge.source.stage in inside and edge.target.stage in inside:
                part.edges.append(edge)
            elif edge.source.stage in inside:
                part.open_ports.add(edge.source)
            elif edge.target.stage in inside:
                part.open_ports.add(edge.target)
        if self.entry is not None and self.entry.stage in inside:
            part.entry = self.entry
        else:
            part.entry = part._main_input(first)
            part.open_ports.discard(part.entry)
        return part

    def _main_input(self, stage: str) -> Port:
        """Where requests enter a slice: an input of `stage` whose edge was cut, preferably `in`."""
        inputs = list(self.stages[stage].inputs)
        cut = [port for port in inputs if Port(stage, port) in self.open_ports] or inputs
        return Port(stage, "in" if "in" in cut else cut[0])

    def _move_behind(self, name: str, before: str | None) -> None:
        """Moves a stage in the order of the flow; None: to its begin."""
        moved = self.stages.pop(name)
        order: dict[str, Stage[Any, Any]] = {name: moved} if before is None else {}
        for other, stage in self.stages.items():
            order[other] = stage
            if other == before:
                order[name] = moved
        self.stages = order

    def _require_stage(self, name: str) -> None:
        if name not in self.stages:
            raise GraphError(f"there is no stage {name}: the stages are {', '.join(self.stages)}")

    def _require_port(self, port: Port, side: Literal["inputs", "outputs"]) -> None:
        self._require_stage(port.stage)
        _require_port_of(port.stage, self.stages[port.stage], port.port, side)

    # -- checking

    def check(self) -> None:
        """Raises `GraphError` for the first problem; `_complaints` lists the checks."""
        for complaint in self._complaints():
            raise GraphError(complaint)

    def _complaints(self) -> Iterator[str]:
        yield from self._edges_without_terms()
        yield from self._ports_with_two_edges()
        yield from self._unconnected_ports()
        yield from self._mismatched_types()
        yield from self._unreachable_stages()
        yield from self._bad_cycles()

    def _edges_without_terms(self) -> Iterator[str]:
        for edge in self.edges:
            if edge.capacity is None or edge.capacity < 1:
                yield f"edge {edge.name} has capacity {edge.capacity}: give it capacity=, at least 1, with its reason"
            elif edge.when_full not in ("wait", "never"):
                yield f'edge {edge.name} does not say what happens when it is full: when_full="wait" or "never"'
            elif edge.when_full == "never" and edge.credits is None:
                yield f'edge {edge.name} is when_full="never" without credits: set credits= to what bounds it'
            elif edge.credits is not None and edge.credits > edge.capacity:
                yield f"edge {edge.name} holds {edge.capacity} and has {edge.credits} credits: raise its capacity"

    def _ports_with_two_edges(self) -> Iterator[str]:
        seen: dict[Port, Edge] = {}
        for edge in self.edges:
            for port in (edge.source, edge.target):
                if port in seen:
                    yield (
                        f"{port} is on two edges, {seen[port].name} and {edge.name}: a channel has one consumer and "
                        "one producer port; use tap() for a copy, or another port"
                    )
                seen[port] = edge

    def _unconnected_ports(self) -> Iterator[str]:
        joined = {edge.source for edge in self.edges} | {edge.target for edge in self.edges} | self.open_ports
        for name, stage in self.stages.items():
            for port, kind in ((Port(name, p), kind) for p, kind in stage.outputs.items()):
                if port not in joined:
                    yield f"output {port} goes nowhere: connect it to the stage that takes {_show(kind)}"
            for port, kind in ((Port(name, p), kind) for p, kind in stage.inputs.items()):
                if port not in joined and port != self.entry:
                    yield f"input {port} comes from nowhere: connect a stage that makes {_show(kind)}"

    def _mismatched_types(self) -> Iterator[str]:
        for edge in self.edges:
            made = self.stages[edge.source.stage].outputs[edge.source.port]
            taken = self.stages[edge.target.stage].inputs[edge.target.port]
            if not _fits(made, taken):
                yield (
                    f"{edge.source} makes {_show(made)} and {edge.target} takes {_show(taken)}: put a stage between "
                    "them that turns one into the other, or insert yours elsewhere"
                )

    def _unreachable_stages(self) -> Iterator[str]:
        if self.entry is None:
            yield "the graph has no entry: set entry to an input port"
            return
        reached = {self.entry.stage} | {port.stage for port in self.open_ports if port.port in self._inputs(port.stage)}
        grew = True
        while grew:
            found = {edge.target.stage for edge in self.edges if edge.source.stage in reached}
            grew = not found <= reached
            reached |= found
        for name in self.stages:
            if name not in reached:
                yield f"stage {name} cannot be reached from {self.entry}: connect it, or leave it out"

    def _inputs(self, stage: str) -> Sequence[str]:
        return list(self.stages[stage].inputs)

    def _bad_cycles(self) -> Iterator[str]:
        for cycle in self._cycles():
            path = " -> ".join([*cycle, cycle[0]])
            edges = [self._edge_between(a, b) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
            if all(edge.when_full == "wait" for group in edges for edge in group):
                yield f"{path} is a cycle in which every edge waits when full, so it can deadlock: make one never full"
            elif not any(edge.credits is not None for group in edges for edge in group):
                yield f"{path} is a cycle without credits, so nothing bounds what is in it: give one edge credits"

    def _edge_between(self, source: str, target: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.source.stage == source and edge.target.stage == target]

    def _cycles(self) -> list[list[str]]:
        """Each simple cycle once, by depth-first search from its first stage in flow order.

        Graphs are small.
        """
        order = {name: i for i, name in enumerate(self.stages)}
        follows: dict[str, list[str]] = {name: [] for name in self.stages}
        for edge in self.edges:
            if edge.target.stage not in follows[edge.source.stage]:
                follows[edge.source.stage].append(edge.target.stage)
        cycles: list[list[str]] = []

        def walk(path: list[str]) -> None:
            for following in follows[path[-1]]:
                if following == path[0]:
                    cycles.append(list(path))
                elif following not in path and order[following] > order[path[0]]:
                    walk([*path, following])

        for name in self.stages:
            walk([name])
        return cycles

    # -- showing

    def to_json(self) -> dict[str, Any]:
        """The graph as plain data: stages with their ports, edges with their settings."""
        return {
            "entry": str(self.entry) if self.entry else None,
            "stages": [
                {
                    "name": name,
                    "class": type(stage).__name__,
                    "inputs": {port: _show(kind) for port, kind in stage.inputs.items()},
                    "outputs": {port: _show(kind) for port, kind in stage.outputs.items()},
                }
                for name, stage in self.stages.items()
            ],
            "edges": [
                {
                    "source": str(edge.source),
                    "target": str(edge.target),
                    "capacity": edge.capacity,
                    "when_full": edge.when_full,
                    "credits": edge.credits,
                    "reason": edge.reason,
                }
                for edge in self.edges
            ],
        }

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart. Dotted edges never wait."""
        lines = ["flowchart LR"]
        lines += [f"    {name}[{name}]" for name in self.stages]
        for edge in self.edges:
            arrow = "-->" if edge.when_full == "wait" else "-.->"
            lines.append(f"    {edge.source.stage} {arrow}|{edge.capacity}| {edge.target.stage}")
        return "\n".join(lines) + "\n"


def _require_port_of(name: str, stage: Stage[Any, Any], port: str, side: Literal["inputs", "outputs"]) -> None:
    ports = getattr(stage, side)
    if port not in ports:
        raise GraphError(f"stage {name} has no {side[:-1]} {port}: it has {', '.join(ports) or 'none'}")


def _port(text: str, default: str) -> Port:
    stage, _, port = text.partition(".")
    return Port(stage, port or default)


def _parts(kind: Any) -> tuple[Any, ...]:
    if isinstance(kind, typing.TypeAliasType) if hasattr(typing, "TypeAliasType") else False:
        return _parts(kind.__value__)
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _fits(made: Any, taken: Any) -> bool:
    """Whether a port that takes `taken` accepts everything of type `made`."""
    if made is Any or taken is Any:
        return True
    return all(any(_is_subtype(part, wanted) for wanted in _parts(taken)) for part in _parts(made))


def _is_subtype(part: Any, wanted: Any) -> bool:
    if wanted is Any or part is Any or part == wanted:
        return True
    return isinstance(part, type) and isinstance(wanted, type) and issubclass(part, wanted)


def _show(kind: Any) -> str:
    return " | ".join(getattr(part, "__name__", str(part)) for part in _parts(kind))
