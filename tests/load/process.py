"""What a server process holds: memory, threads, descriptors and processor time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from tests.deploy.running import RunningServer

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds at one time."""

    rss_mib: float
    num_threads: int
    num_descriptors: int
    cpu_s: float

    def holds_no_more_than(self, other: Held) -> bool:
        """Of threads and descriptors."""
        return self.num_threads <= other.num_threads and self.num_descriptors <= other.num_descriptors

    @classmethod
    def by(cls, pid: int) -> Held:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(process.memory_info().rss / MIB, process.num_threads(), process.num_fds(), times.user + times.system)


def settled(server: RunningServer, seconds: float = 10.0, enough: Held | None = None) -> Held:
    """What the server holds once its connections are closed: when it held no more for a second, or after `seconds`, or
    when it holds no more threads and descriptors than `enough`."""
    if server.is_scripted:
        server.wait_until_idle(30.0)
        server.ask("collect")
    deadline, least, since = time.monotonic() + seconds, Held.by(server.process.pid), time.monotonic()
    while time.monotonic() < min(deadline, since + 1.0):
        if enough is not None and least.holds_no_more_than(enough):
            break
        time.sleep(0.1)
        now = Held.by(server.process.pid)
        if now.num_descriptors < least.num_descriptors or now.num_threads < least.num_threads:
            since = time.monotonic()
        least = now
    return least


def slope(counts: list[int], rss_mib: list[float]) -> tuple[float, float]:
    """Growth in MiB per 10,000 requests by least squares, and half of its 95 % confidence interval."""
    x, y = np.asarray(counts, float) / 10_000, np.asarray(rss_mib)
    spread = float(((x - x.mean()) ** 2).sum())
    growth = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - growth * (x - x.mean())
    return growth, 1.96 * float(np.sqrt((rest**2).sum() / max(1, len(x) - 2) / spread))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` percent of `values` are; 0 for none."""
    return float(np.percentile(values, share)) if values else 0.0


Figures = dict[str, Any]
