from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from millrace.deploy.front_processes.front_metrics import add_ended, empty, packed, rendered
from millrace.deploy.front_processes.words import FrontState
from millrace.deploy.metrics.families import counter, gauge, histogram
from millrace.runtime.histogram import Histogram

STATES = [FrontState(0, 11, "ready", None, 0), FrontState(1, 12, "loading", "it starts", 2)]
LABELS = {"model_name": 'a "b"\n', "engine": "0"}


def stage_seconds(tokenize: float, execute: float) -> Metric:
    family = CounterMetricFamily("millrace:stage_seconds", "Time.", labels=["stage", "state"])
    family.add_metric(["tokenize", "busy"], tokenize)
    family.add_metric(["execute", "busy"], execute)
    return family


def health(state: str) -> Metric:
    family = GaugeMetricFamily("millrace:health", "State.", labels=["state"])
    for name in ("loading", "ready", "dead"):
        family.add_metric([name], float(name == state))
    return family


def front(tokens: int, running: int, times: Iterable[int], stages: tuple[float, float], state: str) -> bytes:
    seen = Histogram([1, 2])
    for time in times:
        seen.observe(time)
    return packed(
        [
            counter("vllm:generation_tokens", "Tokens.", tokens, LABELS),
            gauge("vllm:num_requests_running", "Running.", running, LABELS),
            histogram("vllm:e2e_request_latency_seconds", "Time.", seen, LABELS),
            stage_seconds(*stages),
            health(state),
        ]
    )


def values(exposition: bytes) -> dict[tuple[str, str], float]:
    """(sample, its last label but the model) -> value."""
    families = text_string_to_metric_families(exposition.decode())
    samples = [sample for family in families for sample in family.samples]
    last = {id(one): [value for name, value in one.labels.items() if name != "model_name"] for one in samples}
    found = {(one.name, last[id(one)][-1]): one.value for one in samples}
    assert all(one.labels["model_name"] == LABELS["model_name"] for one in samples if "model_name" in one.labels)
    return found


def test_counts_of_fronts_are_added_up_and_those_of_engines_are_not() -> None:
    first, second = front(7, 3, [1, 3], (1.0, 9.0), "ready"), front(5, 3, [2], (2.0, 8.5), "ready")
    found = values(rendered({1: second, 0: first}, empty(), STATES))
    assert found["vllm:generation_tokens_total", "0"] == 12
    assert found["vllm:num_requests_running", "0"] == 3
    assert found["vllm:e2e_request_latency_seconds_bucket", "1.0"] == 1
    assert found["vllm:e2e_request_latency_seconds_bucket", "2.0"] == 2
    assert found["vllm:e2e_request_latency_seconds_count", "0"] == 3
    assert found["millrace:stage_seconds_total", "busy"] == 9.0  # execute is the last one
    assert found["millrace:front_up", "0"] == 1 and found["millrace:front_up", "1"] == 0
    assert found["millrace:front_restarts_total", "1"] == 2


def test_counters_of_fronts_that_ended_stay_and_their_gauges_go() -> None:
    ended = add_ended(add_ended(empty(), front(7, 3, [1], (1.0, 9.0), "ready")), front(2, 4, [], (0.5, 9.5), "dead"))
    found = values(rendered({0: front(1, 0, [], (0.0, 9.5), "ready")}, ended, STATES))
    assert found["vllm:generation_tokens_total", "0"] == 10
    assert found["vllm:num_requests_running", "0"] == 0
    assert found["vllm:e2e_request_latency_seconds_count", "0"] == 1
    assert found["millrace:stage_seconds_total", "busy"] == 9.5
    assert found["millrace:health", "ready"] == 1 and found["millrace:health", "dead"] == 0


def test_the_worst_state_of_the_fronts_is_told() -> None:
    fronts = {0: front(0, 0, [], (0, 0), "ready"), 1: front(0, 0, [], (0, 0), "loading")}
    found = values(rendered(fronts, empty(), STATES))
    assert [found["millrace:health", name] for name in ("loading", "ready", "dead")] == [1, 0, 0]


def test_without_any_front_only_the_fronts_themselves_are_told() -> None:
    assert {name for name, _ in values(rendered({}, empty(), STATES))} == {
        "millrace:front_up",
        "millrace:front_restarts_total",
    }
