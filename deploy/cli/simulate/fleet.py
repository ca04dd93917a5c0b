"""`millrace simulate --fleet N`: the trace over several engines behind a router, once for each rule of the router."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack

from ....stages.errors import ConfigError
from ....stages.recordings.cost_model import CostModel
from ....stages.recordings.engine_group import EngineGroup, EnginesHere
from ....stages.recordings.fleet_simulation import Death, FleetSimulation
from ....stages.recordings.format import RecordedEngine
from ....stages.recordings.simulated_engine import AdmissionLimits
from ....stages.recordings.workloads import Workload
from ....stages.routing.policies import POLICIES
from .group_processes import EnginesInProcess

FEW_ENGINES = 4  # with fewer engines a process, one process is as fast


def check_fleet(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that make no fleet."""
    for name in ("fleet", "processes"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 4096:
            raise ConfigError(f"--{name} {value}: must be 1 to 4096")
    policies(options.policy)
    deaths(options)


def policies(text: str) -> Sequence[str]:
    """The rules of a comma-separated list, or all of them. Raises `ConfigError`."""
    if text == "all":
        return tuple(POLICIES)
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {text}: {name!r} is no rule; must be of {', '.join(POLICIES)}, or all")
    return names


def deaths(options: argparse.Namespace) -> Sequence[Death]:
    """Of `--kill`. Raises `ConfigError`."""
    found = []
    for text in options.kill or ():
        engine, _, at = text.partition("@")
        try:
            death = Death(float(at.removesuffix("s")), int(engine), options.restart_s)
        except ValueError:
            raise ConfigError(f"--kill {text}: must be ENGINE@SECONDS, such as 3@120") from None
        if not 0 <= death.engine < options.fleet or not 0 <= death.at_s < float("inf"):
            raise ConfigError(f"--kill {text}: must be of the engines 0 to {options.fleet - 1}, at 0 seconds or later")
        found.append(death)
    return found


def run_fleet(
    options: argparse.Namespace,
    trace: Workload,
    engine: RecordedEngine,
    model: CostModel,
    admission: AdmissionLimits,
    policy: str,
) -> dict[str, float | int | None]:
    """The results of a trace with one rule."""
    size, lost = options.fleet, deaths(options)
    count = options.processes or min(len(os.sched_getaffinity(0)), size // FEW_ENGINES) or 1
    numbers = [range(first, size, count) for first in range(min(count, size))]
    with ExitStack() as stack:
        groups: list[EngineGroup] = []
        for some in numbers:
            if count == 1:
                groups.append(EnginesHere(some, engine, model, admission))
                continue
            group = EnginesInProcess(some, engine, model, admission)
            stack.callback(group.close)
            groups.append(group)
        by_engine = {number: group for some, group in zip(numbers, groups, strict=True) for number in some}
        return FleetSimulation(by_engine, engine, POLICIES[policy](), lost).run(trace).summary()
