"""Metrics of LoRA adapters; without adapters, only that there is no slot. Labels are names of loaded adapters only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from .families import counter, gauge

if TYPE_CHECKING:
    from ...stages.engine.engine_status import AdapterSlotsStatus
    from ...stages.engine.front_status import HostAdaptersStatus


def adapters(
    names: Mapping[str, Sequence[str]] | None,
    host: HostAdaptersStatus | None,
    slots: AdapterSlotsStatus | None,
    wall_s: float,
) -> Iterator[Metric]:
    """The families of one scrape, at `wall_s` seconds since 1970. `names` are those of each digest."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting sequences; the value is the time of the scrape.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    if names is None or host is None or slots is None:
        info.add_metric(["0", "", ""], wall_s)  # gateways that look for it report an error where it is missing
        yield info
        return
    running = _named(names, [digest for _, digest, num_running in slots.slots if num_running])
    waiting = _named(names, slots.waiting)
    waiting = ",".join(sorted({*waiting.split(","), *host.waiting} - {""}))
    info.add_metric([str(len(slots.slots)), running, waiting], wall_s)
    yield info
    yield counter("millrace:lora_loads", "Adapters loaded into a device slot.", slots.num_loads, {})
    yield counter("millrace:lora_host_loads", "Adapters read from disk.", host.num_loads, {})
    yield counter("millrace:lora_host_load_seconds", "Time to read them.", host.load_seconds, {})
    yield counter("millrace:lora_host_evictions", "Adapters evicted from the host.", host.num_evicted, {})
    yield gauge("millrace:lora_resident", "Adapters in device slots.", slots.num_resident, {})
    yield gauge("millrace:lora_host_adapters", "Adapters in host memory.", len(host.num_users), {})
    yield gauge("millrace:lora_host_bytes", "Memory of those.", host.num_bytes, {})
    num_waiting = sum(host.waiting.values())
    yield gauge("millrace:lora_host_waiting", "Requests that wait until their adapter is read.", num_waiting, {})
    yield gauge(
        "millrace:lora_waiting", "Sequences that wait for a device slot of their adapter.", slots.num_waiting, {}
    )
    yield gauge("millrace:lora_owed", "Of those, passed by fifty others.", slots.num_owed, {})


def _named(names: Mapping[str, Sequence[str]], digests: Iterable[str]) -> str:
    """The names of these adapters, sorted, with commas: all names of each; without those that were unloaded."""
    return ",".join(sorted(name for digest in digests for name in names.get(digest, ())))
