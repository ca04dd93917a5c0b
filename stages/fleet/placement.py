"""What each engine process of a fleet gets of the machine: CPUs, threads, and a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...runtime.env.cpus import ComputeThreads, Cpus
from ..config import EngineConfig
from ..errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """The share of one engine process."""

    config: EngineConfig
    cpus: tuple[int, ...] = ()  # (): all
    environment: Mapping[str, str] = field(default_factory=dict)


def places(config: EngineConfig, cpus: Cpus, environment: Mapping[str, str], root: Path = Path("/")) -> list[Place]:
    """The shares of all engine processes. Raises `ConfigError` for settings that fit only one.

    Cores are dealt in the order of their NUMA nodes, so that a process is on as few nodes as possible. With fewer cores
    than processes, all may use all. On a machine with GPUs the process i gets the i-th that this one may use, or the
    i-th group of `tensor_parallel_size` of them.
    """
    count = config.data_parallel_size
    check(config)
    threads = config.threads
    if threads is None:
        threads = max(1, ComputeThreads.choose(None, cpus, environment).count // count)
    shares = deal(cpus, count, root)
    gpus = _gpus(config, environment)
    return [
        Place(replace(config, threads=threads), shares[index], {} if gpus is None else {VISIBLE: gpus[index]})
        for index in range(count)
    ]


def check(config: EngineConfig) -> None:
    """Raises `ConfigError` for settings that do not go with several engine processes."""
    count = config.data_parallel_size
    if count == 1:
        return
    if config.record is not None:
        raise ConfigError(f"record = {config.record}: records one engine; set data_parallel_size = 1, not {count}")
    if config.gpu is not None and ":" in config.device:
        message = f"device = {config.device}: is one GPU, and data_parallel_size = {count} needs {count}; set cuda"
        raise ConfigError(f"{message}, and CUDA_VISIBLE_DEVICES to choose them")


def deal(cpus: Cpus, count: int, root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Disjoint shares of the CPUs, one for each of `count` processes; () for each if there are too few cores.

    All CPUs of a core are in one share.
    """
    cores = sorted(cpus.cores, key=lambda cpu: (_node(cpu, root), cpu))
    if len(cores) < count or count == 1:
        return [()] * count
    bounds = [index * len(cores) // count for index in range(count + 1)]
    owner = {cpu: index for index in range(count) for cpu in cores[bounds[index] : bounds[index + 1]]}
    for cpu in cpus.allowed:
        if cpu not in owner:
            owner[cpu] = next((owner[one] for one in _siblings(cpu, root) if one in owner), 0)
    return [tuple(cpu for cpu in cpus.allowed if owner[cpu] == index) for index in range(count)]


def _gpus(config: EngineConfig, environment: Mapping[str, str]) -> Sequence[str] | None:
    """The visible GPUs of each process, one for each of its ranks; None on a CPU."""
    count, size = config.data_parallel_size, config.tensor_parallel_size
    if config.device == "cpu" or count == 1:
        return None
    named = environment.get(VISIBLE)  # "": none
    every = range(count * size) if named is None else [one.strip() for one in named.split(",") if one.strip()]
    visible = list(map(str, every))
    if twice := [gpu for gpu in dict.fromkeys(visible) if visible.count(gpu) > 1]:
        raise ConfigError(f"{VISIBLE} = {named}: names {twice[0]} twice, and each engine takes the memory of its GPU")
    groups = [",".join(visible[begin : begin + size]) for begin in range(0, len(visible) - size + 1, size)]
    if len(groups) < count:
        if config.device == "auto":
            return groups + ["-1"] * (count - len(groups))
        needs = f"data_parallel_size = {count}: needs {count * size} GPUs"
        raise ConfigError(f"{needs}, and {VISIBLE} names {len(visible)}")
    return groups[:count]


def _node(cpu: int, root: Path) -> int:
    nodes = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(path.name[4:]) for path in nodes if path.name[4:].isdigit()), default=0)


def _siblings(cpu: int, root: Path) -> list[int]:
    """The CPUs of the same core."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        text = path.read_text()
    except OSError:
        return []
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def environment_here() -> Mapping[str, str]:
    """The environment that engine processes inherit."""
    return os.environ
