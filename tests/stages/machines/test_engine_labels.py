"""What engines say of themselves, as fronts show it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Metric, generate_latest

from millrace.deploy.metrics.families import engines
from millrace.stages.machines.engine_sources import FixedAddress
from tests.stages.machines.scripted_engines import ScriptedMachines, until, with_machines

A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))


@with_machines
async def test_a_front_shows_the_labels_of_each_engine_and_forgets_those_of_one_replaced(
    machines: ScriptedMachines,
) -> None:
    await machines.start("a", labels={"version": "v1", "zone": "eu"})
    await machines.start("b", labels={"version": "v2"})
    async with machines.front(A, B) as engine:
        await until(lambda: all(one["state"] == "ready" for one in engine.engines))
        assert [one["labels"] for one in engine.engines] == [{"version": "v1", "zone": "eu"}, {"version": "v2"}]
        await machines.stop("a")
        await machines.start("a", labels={"version": "v3"})
        await until(lambda: engine.engines[0]["labels"] == {"version": "v3"})


def test_labels_are_those_of_one_metric_with_a_value_for_each_engine() -> None:
    figures = dict.fromkeys(("num_requests", "num_deaths", "num_expected_cached_tokens"), 0) | {"state": "ready"}
    fleet = [
        {"index": 0, "address": "a:1", "labels": {"version": "v1", "zone": "eu"}} | figures,
        {"index": 1, "address": None, "labels": {"version": "v2"}} | figures,
    ]

    class Collector:
        def collect(self) -> list[Metric]:
            return list(engines(fleet))

    registry = CollectorRegistry()
    registry.register(Collector())
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("millrace:engine_lab")]
    assert lines == [
        'millrace:engine_labels{address="a:1",engine="0",label_version="v1",label_zone="eu"} 1.0',
        'millrace:engine_labels{address="",engine="1",label_version="v2",label_zone=""} 1.0',
    ]
