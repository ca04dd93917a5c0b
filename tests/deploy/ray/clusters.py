"""A Ray cluster of several nodes on this machine, and what is left of it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil

NODE = {"object_store_memory": 80 << 20, "include_log_monitor": False}  # Ray's least, nearly
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayNodes:
    """A head without CPUs, and `nodes` nodes with two CPUs each, as long as it is a context. Joins none of them."""

    def __init__(self, nodes: int = 2, head_cpus: int = 0) -> None:
        os.environ.update(QUIET)
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": head_cpus, "include_dashboard": False, "no_monitor": True}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | NODE)
        self.nodes: list[Any] = []
        try:
            for _ in range(nodes):
                self.add()
        except BaseException:
            self.cluster.shutdown()
            raise

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """Another node, of `nodes` too."""
        self.nodes.append(self.cluster.add_node(num_cpus=2, **NODE))

    def remove(self, node_id: str) -> None:
        """Kills the node's raylet, as when its machine fails; its workers end with it."""
        (node,) = [one for one in self.nodes if one.node_id == node_id]
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cluster.shutdown()


def actors_alive() -> list[int]:
    """Ids of the processes that run engines as actors."""
    running = psutil.process_iter(["cmdline"])
    return [one.pid for one in running if any("EngineActor" in part for part in one.info["cmdline"] or ())]


def resident_bytes() -> int:
    """Of this process, of all of Ray's and of those that they started; what they share counts for each."""
    found = {psutil.Process()}
    for process in psutil.process_iter(["cmdline"]):
        if is_of_ray(" ".join(process.info["cmdline"] or ())):
            found |= {process, *process.children(recursive=True)}
    total = 0
    for process in found:
        with suppress(psutil.Error):  # it has ended
            total += int(process.memory_info().rss)
    return total


def is_of_ray(command: str) -> bool:
    parts = ("/ray/core/src/ray/", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/")
    return command.startswith("ray::") or any(part in command for part in parts)
