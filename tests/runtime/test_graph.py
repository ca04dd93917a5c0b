"""Declared graphs: how they are changed, and every complaint of `check`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Never

import pytest

from millrace.runtime.graph import Graph, GraphError, Port
from millrace.runtime.stage import Stage, stage


@dataclass(frozen=True)
class Text:
    request_id: str


@dataclass(frozen=True)
class Shout(Text):
    pass


@dataclass(frozen=True)
class Number:
    request_id: str


class Source(Stage[Text, Text]):
    pass


class Middle(Stage[Text, Text]):
    pass


class Sink(Stage[Text, Never]):
    pass


class Numbers(Stage[Number, Number]):
    pass


class Loop(Stage[Text, Text]):
    """Takes new work and feedback."""

    inputs = {"in": Text, "feedback": Text}


class Worker(Stage[Text, Text]):
    outputs = {"out": Text, "feedback": Text}


def chain(*stages: Stage[Any, Any]) -> Graph:
    graph = Graph()
    names = [graph.add(each) for each in stages]
    graph.entry = Port(names[0], "in")
    for source, target in zip(names, names[1:], strict=False):
        graph.connect(source, target, capacity=2, reason="a test")
    return graph


def cycle(**feedback: Any) -> Graph:
    """loop -> worker -> sink, with worker.feedback -> loop.feedback."""
    graph = chain(Loop(), Worker(), Sink())
    graph.connect("worker.feedback", "loop.feedback", reason="a test", **feedback)
    return graph


def edges(graph: Graph) -> list[str]:
    return [edge.name for edge in graph.edges]


def complaint(graph: Graph) -> str:
    with pytest.raises(GraphError) as caught:
        graph.check()
    return str(caught.value)


# -- ports


def test_port_types_come_from_the_class_and_a_sink_has_no_output() -> None:
    assert Middle.inputs == {"in": Text} and Middle.outputs == {"out": Text}
    assert Sink.outputs == {}
    assert Loop.inputs == {"in": Text, "feedback": Text} and Loop.outputs == {"out": Text}


def test_a_subclass_keeps_the_ports_its_base_declared() -> None:
    class Faster(Loop):
        pass

    assert Faster.inputs == {"in": Text, "feedback": Text} and Faster.outputs == {"out": Text}


def test_port_types_of_a_function_stage_come_from_its_annotations() -> None:
    @stage
    def same(text: Text) -> Text:
        return text

    @stage(name="sometimes", concurrency=3)
    async def maybe(text: Text) -> Text | None:
        return text

    @stage
    async def several(text: Text) -> AsyncIterator[Number]:
        yield Number(text.request_id)

    @stage
    def some(text: Text) -> Iterator[Number]:
        yield Number(text.request_id)

    @stage
    def swallow(text: Text) -> None:
        return None

    @stage
    def anything(item):  # type: ignore[no-untyped-def]
        return item

    assert (same.name, same.inputs, same.outputs) == ("same", {"in": Text}, {"out": Text})
    assert (maybe.name, maybe.outputs, maybe.concurrency) == ("sometimes", {"out": Text}, 3)
    assert several.outputs == {"out": Number} and some.outputs == {"out": Number}
    assert swallow.outputs == {}
    assert anything.inputs == {"in": Any} and anything.outputs == {"out": Any}


def test_a_function_stage_of_two_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="@stage function both takes 2 parameters: it must take one"):

        @stage
        def both(a: Text, b: Text) -> Text:
            return a


# -- changing


def test_insert_puts_a_stage_on_an_edge_and_keeps_the_edges_terms() -> None:
    graph = chain(Source(), Sink())
    graph.insert(Middle(), after="source")
    assert edges(graph) == ["source.out->middle.in", "middle.out->sink.in"]
    assert [edge.capacity for edge in graph.edges] == [2, 2]
    assert list(graph.stages) == ["source", "middle", "sink"]
    graph.insert(Middle(), after="source.out", name="narrow", capacity=1)
    assert edges(graph) == ["source.out->narrow.in", "narrow.out->middle.in", "middle.out->sink.in"]
    assert [edge.capacity for edge in graph.edges] == [1, 2, 2]
    graph.check()


def test_insert_where_nothing_follows_says_so() -> None:
    graph = Graph()
    graph.add(Source())
    with pytest.raises(GraphError, match="nothing follows source.out: connect it first"):
        graph.insert(Middle(), after="source")


def test_insert_before_a_stage_and_at_open_ends_keeps_the_order_of_the_flow() -> None:
    graph = chain(Source(), Middle(), Sink())
    graph.insert(Middle(), before="sink", name="late")
    assert list(graph.stages) == ["source", "middle", "late", "sink"]
    part = graph.cut("middle", "late")
    part.entry = None
    part.open_ports = {Port("middle", "in"), Port("late", "out")}
    part.insert(Middle(), before="middle", name="first")
    part.insert(Middle(), "late", name="last")
    assert list(part.stages) == ["first", "middle", "late", "last"]
    assert part.open_ports == {Port("first", "in"), Port("last", "out")}
    assert edges(part) == ["middle.out->late.in", "first.out->middle.in", "late.out->last.in"]
    with pytest.raises(GraphError, match="nothing comes before source.in|no input in"):
        graph.insert(Middle(), before="source", name="never")
    with pytest.raises(GraphError, match="name one place"):
        graph.insert(Middle(), after="source", before="sink", name="two")


def test_an_insert_that_fails_leaves_the_graph_as_it_was() -> None:
    graph = chain(Source(), Sink())
    with pytest.raises(GraphError, match="stage sink2 has no output out: it has none"):
        graph.insert(Sink(), after="source", name="sink2")
    with pytest.raises(GraphError, match="two stages are called sink"):
        graph.insert(Middle(), after="source", name="sink")
    assert edges(graph) == ["source.out->sink.in"] and list(graph.stages) == ["source", "sink"]
    graph.check()


def test_replace_takes_a_stage_with_the_same_ports_and_refuses_others() -> None:
    graph = cycle(capacity=4, when_full="never", credits=4)
    graph.replace("sink", Sink())
    with pytest.raises(GraphError, match="stage worker has no output feedback: it has out"):
        graph.replace("worker", Middle())
    assert type(graph.stages["worker"]) is Worker
    graph.check()


def test_a_cut_keeps_the_inner_edges_and_opens_the_ends() -> None:
    graph = chain(Source(), Middle(), Numbers(), Sink())
    part = graph.cut("middle", "numbers")
    assert list(part.stages) == ["middle", "numbers"] and edges(part) == ["middle.out->numbers.in"]
    assert part.entry == Port("middle", "in") and part.open_ports == {Port("numbers", "out")}
    assert edges(graph.cut("middle", "middle")) == []
    with pytest.raises(GraphError, match=r"slice\(sink, middle\): middle comes before sink; the order is source -> "):
        graph.cut("sink", "middle")


def test_a_cut_through_a_cycle_leaves_the_feedback_open_on_purpose() -> None:
    graph = cycle(capacity=4, when_full="never", credits=4)
    part = graph.cut("worker", "sink")
    assert part.open_ports == {Port("worker", "feedback")}
    part.check()
    graph.cut("loop", "loop").check()


def test_requests_enter_a_cut_where_its_edge_was_cut_and_not_at_its_feedback() -> None:
    class Fed(Loop):
        inputs = {"feedback": Text, "in": Text}

    graph = chain(Source(), Fed(), Worker(), Sink())
    graph.connect("worker.feedback", "fed.feedback", capacity=4, when_full="never", credits=4)
    assert graph.cut("fed", "worker").entry == Port("fed", "in")
    assert graph.cut("fed", "fed").entry == Port("fed", "in")


# -- complaints, each with its fix


def test_unknown_stages_and_ports_are_named_with_those_there_are() -> None:
    graph = chain(Source(), Sink())
    with pytest.raises(GraphError, match="there is no stage sauce: the stages are source, sink"):
        graph.connect("sauce", "sink", capacity=1)
    with pytest.raises(GraphError, match="stage source has no output left: it has out"):
        graph.connect("source.left", "sink", capacity=1)


def test_two_stages_of_one_name_are_refused() -> None:
    graph = chain(Source(), Sink())
    with pytest.raises(GraphError, match="two stages are called source: give one of them another name"):
        graph.add(Source())


def test_an_edge_needs_a_capacity_and_a_full_policy() -> None:
    graph = chain(Source())
    graph.add(Sink())
    graph.connect("source", "sink")
    assert (
        complaint(graph) == "edge source.out->sink.in has capacity None: give it capacity=, at least 1, with its reason"
    )
    graph.edges.clear()
    graph.connect("source", "sink", capacity=0)
    assert "has capacity 0" in complaint(graph)
    graph.edges.clear()
    graph.connect("source", "sink", capacity=1, when_full=None)
    assert "does not say what happens when it is full" in complaint(graph)


def test_an_edge_that_never_fills_says_what_bounds_it_and_has_room_for_it() -> None:
    assert 'is when_full="never" without credits' in complaint(cycle(capacity=4, when_full="never"))
    assert "holds 2 and has 4 credits: raise its capacity" in complaint(cycle(capacity=2, when_full="never", credits=4))


def test_a_port_on_two_edges_is_refused() -> None:
    graph = chain(Source(), Sink())
    graph.add(Sink(), "other")
    graph.connect("source", "other", capacity=1)
    assert complaint(graph).startswith("source.out is on two edges, source.out->sink.in and source.out->other.in")


def test_unconnected_ports_are_named_with_what_they_carry() -> None:
    graph = Graph()
    graph.add(Source())
    graph.entry = Port("source", "in")
    assert complaint(graph) == "output source.out goes nowhere: connect it to the stage that takes Text"
    graph = chain(Source(), Sink())
    graph.stages["sink"].inputs = {"in": Text, "side": Number}  # type: ignore[misc]
    assert complaint(graph) == "input sink.side comes from nowhere: connect a stage that makes Number"


def test_types_that_do_not_fit_are_named_at_both_ends() -> None:
    graph = chain(Source(), Numbers(), Sink())
    assert complaint(graph).startswith("source.out makes Text and numbers.in takes Number: put a stage between them")


def test_a_subtype_a_union_and_anything_fit() -> None:
    class Loud(Stage[Text, Shout]):
        pass

    class Either(Stage[Text | Number, Text]):
        pass

    class Mixed(Stage[Any, Text | Number]):
        pass

    graph = Graph()
    for each in (Loud(), Mixed(), Sink()):
        graph.add(each)
    graph.add(Either(), "either")
    graph.entry = Port("loud", "in")
    graph.connect("loud", "mixed", capacity=1)
    graph.connect("mixed", "either", capacity=1)
    graph.connect("either", "sink", capacity=1)
    graph.check()
    graph.edges.pop()
    graph.edges.pop()
    graph.connect("mixed", "sink", capacity=1)
    del graph.stages["either"]
    assert complaint(graph).startswith("mixed.out makes Text | Number and sink.in takes Text")


def test_a_graph_says_where_requests_enter() -> None:
    graph = chain(Source(), Sink())
    graph.entry = None
    graph.open_ports.add(Port("source", "in"))
    assert complaint(graph) == "the graph has no entry: set entry to an input port"


def test_a_stage_that_no_request_can_reach_is_named() -> None:
    graph = chain(Source(), Sink())
    graph.add(Loop(), "island")
    graph.add(Worker(), "shore")
    graph.connect("island", "shore", capacity=1)
    graph.connect("shore.feedback", "island.feedback", capacity=1, when_full="never", credits=1)
    graph.connect("shore", "island", capacity=1)
    assert complaint(graph) == "stage island cannot be reached from source.in: connect it, or leave it out"


def test_a_cycle_of_waiting_edges_can_deadlock_and_is_refused() -> None:
    assert complaint(cycle(capacity=4)).startswith(
        "loop -> worker -> loop is a cycle in which every edge waits when full, so it can deadlock"
    )


def test_a_cycle_in_which_nothing_is_counted_is_refused() -> None:
    graph = cycle(capacity=4, when_full="never", credits=4)
    graph.edges[-1] = replace(graph.edges[-1], credits=None)
    assert 'is when_full="never" without credits' in complaint(graph)
    assert "cycle without credits" in " ".join(graph._bad_cycles())


def test_a_cycle_with_a_credited_edge_that_never_waits_is_accepted() -> None:
    cycle(capacity=4, when_full="never", credits=4).check()


# -- showing


def test_the_graph_shows_itself_as_data_and_as_a_picture() -> None:
    graph = cycle(capacity=4, when_full="never", credits=4)
    told = graph.to_json()
    assert told["entry"] == "loop.in"
    assert told["stages"][0] == {
        "name": "loop",
        "class": "Loop",
        "inputs": {"in": "Text", "feedback": "Text"},
        "outputs": {"out": "Text"},
    }
    assert told["edges"][2]["source"] == "worker.feedback" and told["edges"][2]["credits"] == 4
    assert graph.to_mermaid() == (
        "flowchart LR\n    loop[loop]\n    worker[worker]\n    sink[sink]\n"
        "    loop -->|2| worker\n    worker -->|2| sink\n    worker -.->|4| loop\n"
    )
