"""The metrics of several fronts as those of one server: what each front counts is added up, what engines tell is not.

A front's metrics travel as JSON: a list of families, each [name, type, help, [[sample, labels, value], ...]].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from .words import FrontState

CORE_STAGES = frozenset({"schedule", "allocate", "execute", "sample"})  # of engines; the other stages are of fronts
OF_ENGINES = frozenset(  # families that each front tells alike, as its engines told it
    {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped", "vllm:kv_cache_usage_perc"}
    | {"vllm:cache_config_info", "vllm:cpu_cache_usage_perc", "vllm:num_preemptions", "vllm:prefix_cache_queries"}
    | {"vllm:prefix_cache_hits", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"}
    | {"vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos"}
    | {"vllm:iteration_tokens_total", "millrace:device_idle_gap_seconds", "millrace:num_requests_parked"}
    | {"millrace:kv_blocks", "millrace:kv_slabs", "millrace:admission_blocked", "millrace:step_token_budget"}
    | {"millrace:kv_internal_fragmentation_ratio", "millrace:host_kv_blocks", "millrace:preemptions"}
    | {"millrace:swaps_refused", "millrace:recomputed_tokens", "millrace:host_prefix_cache_hits"}
    | {"millrace:num_requests_drafting", "millrace:engine_up", "millrace:engine_deaths", "millrace:startup_seconds"}
    | {"millrace:engine_process_deaths", "millrace:engine_labels"}
)
HIGHEST = frozenset(  # gauges of which the highest counts
    {"millrace:channel_high_water", "millrace:channel_capacity", "vllm:lora_requests_info", "millrace:split_percent"}
    | {"millrace:shadow_percent"}
)
LONGEST = frozenset({"millrace:startup_seconds"})  # of several models
OF_AN_ENGINE = "millrace:engine_"  # beginning of families with a value for each engine
HEALTH = "millrace:health"
WORST_FIRST = ("dead", "stalled", "draining", "loading", "ready")  # states of health
GROWING = ("counter", "histogram")

Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample
Families = dict[str, tuple[str, str, dict[Key, float]]]  # name -> type, help, samples


def packed(families: Iterable[Metric]) -> bytes:
    """The metrics of a front, to send."""
    return orjson.dumps(
        [
            [family.name, family.type, family.documentation, [[s.name, s.labels, s.value] for s in family.samples]]
            for family in families
        ]
    )


def empty() -> bytes:
    """No metrics."""
    return b"[]"


def add_ended(ended: bytes, data: bytes, model: str | None = None) -> bytes:
    """`ended` with the counters and histograms of one more front that has ended; `model`: its own, of several."""
    total = _read(ended)
    for name, (kind, text, samples) in _read(data).items():
        if kind in GROWING:
            own = {key: value for key, value in samples.items() if not _is_of_engines(name, key)}
            if model is not None and name.startswith(OF_AN_ENGINE):
                own = {_of_model(key, model): value for key, value in own.items()}
            _add(total, name, kind, text, own, most=False)
    return _written(total)


def rendered(fronts: Mapping[int, bytes], ended: bytes, states: Iterable[FrontState]) -> bytes:
    """The exposition in Prometheus' text format, for all fronts."""
    every = list(states)
    models = {state.number: state.models[0] for state in every if state.models}
    registry = CollectorRegistry()
    registry.register(_Collector([*summed(fronts, ended, models), *_of_fronts(every)]))
    return generate_latest(registry)


def summed(fronts: Mapping[int, bytes], ended: bytes, models: Mapping[int, str] | None = None) -> Iterator[Metric]:
    """The families of all fronts, in the order of the first. `models`: of each front, if there are several."""
    groups: dict[str, list[bytes]] = {}
    for number, data in sorted(fronts.items()):
        groups.setdefault((models or {}).get(number, ""), []).append(data)
    by_model = {model: _of_one_model(some) for model, some in groups.items()}
    total = _of_models(by_model) if len(set((models or {}).values())) > 1 else next(iter(by_model.values()), {})
    for name, (kind, text, samples) in _read(ended).items():
        _add(total, name, kind, text, samples, most=False)
    for name, (kind, text, samples) in total.items():
        if name == HEALTH:
            samples = _worst(samples)
        family = Metric(name, text, kind)
        for (sample, labels), value in samples.items():
            family.add_sample(sample, dict(labels), value)
        yield family


def _of_one_model(fronts: Iterable[bytes]) -> Families:
    """Of fronts with the same engines: what each counts is added up, and what engines tell is not."""
    total: Families = {}
    for data in fronts:
        for name, (kind, text, samples) in _read(data).items():
            for most in (False, True):
                part = {key: value for key, value in samples.items() if _is_highest(name, key) is most}
                _add(total, name, kind, text, part, most=most)
    return total


def _of_models(by_model: Mapping[str, Families]) -> Families:
    """Of models with engines of their own, which are numbered in each: engine 0 of a is `a/0`."""
    total: Families = {}
    for model, families in by_model.items():
        for name, (kind, text, samples) in families.items():
            if name.startswith(OF_AN_ENGINE):
                samples = {_of_model(key, model): value for key, value in samples.items()}
            _add(total, name, kind, text, samples, most=name in HIGHEST or name in LONGEST)
    return total


def _of_model(key: Key, model: str) -> Key:
    sample, labels = key
    return sample, tuple((name, f"{model}/{value}" if name == "engine" else value) for name, value in labels)


class _Collector:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_fronts(states: Iterable[FrontState]) -> Iterator[Metric]:
    up = GaugeMetricFamily("millrace:front_up", "1 if the front process takes requests.", labels=["front"])
    restarts = CounterMetricFamily("millrace:front_restarts", "Restarts of the front process.", labels=["front"])
    for state in states:
        up.add_metric([str(state.number)], float(state.state == "ready"))
        restarts.add_metric([str(state.number)], state.num_restarts)
    yield up
    yield restarts


def _worst(samples: Mapping[Key, float]) -> dict[Key, float]:
    """1 for the worst state that a front tells, and 0 for the others."""
    state_of = {key: dict(key[1]).get("state", "") for key in samples}
    told = {state_of[key] for key, value in samples.items() if value}
    worst = next((state for state in WORST_FIRST if state in told), "")
    return {key: float(state_of[key] == worst) for key in samples}


def _is_of_engines(name: str, key: Key) -> bool:
    if name in OF_ENGINES:
        return True
    labels = dict(key[1])
    return labels.get("stage") in CORE_STAGES or labels.get("edge", "").partition("->")[0] in CORE_STAGES


def _is_highest(name: str, key: Key) -> bool:
    return name in HIGHEST or _is_of_engines(name, key)


def _add(total: Families, name: str, kind: str, text: str, samples: Mapping[Key, float], *, most: bool) -> None:
    _, _, into = total.setdefault(name, (kind, text, {}))
    for key, value in samples.items():
        into[key] = max(into.get(key, value), value) if most else into.get(key, 0.0) + value


def _read(data: bytes) -> Families:
    families: Families = {}
    for name, kind, text, samples in orjson.loads(data):
        families[name] = (kind, text, {(sample, tuple(labels.items())): value for sample, labels, value in samples})
    return families


def _written(families: Families) -> bytes:
    rows: list[Any] = []
    for name, (kind, text, samples) in families.items():
        rows.append([name, kind, text, [[key[0], dict(key[1]), value] for key, value in samples.items()]])
    return orjson.dumps(rows)
