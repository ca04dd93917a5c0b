"""`millrace simulate --fleet N`: the trace over several engines behind a router, once for each rule of the router."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack

from ....stages.errors import ConfigError
from ....stages.recordings.cost_model import CostModel
from ....stages.recordings.fleet.engine_group import EngineGroup, EnginesHere
from ....stages.recordings.fleet.fleet_simulation import FleetSimulation
from ....stages.recordings.fleet.presence import Death, Scaling
from ....stages.recordings.recorded_engine import RecordedEngine
from ....stages.recordings.simulated_engine import AdmissionLimits
from ....stages.recordings.workloads import Workload
from ....stages.routing.policies import POLICIES
from ....stages.routing.scaling import MOST_BUSY, SCALING_RULES
from .group_processes import EnginesInProcess

FIXED = "fixed"  # always all engines
FEW_ENGINES = 4  # with fewer engines a process, one process is as fast


def check_fleet(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that make no fleet."""
    for name in ("fleet", "processes"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 4096:
            raise ConfigError(f"--{name} {value}: must be 1 to 4096")
    if not 1 <= options.least_engines <= options.fleet:
        raise ConfigError(f"--least-engines {options.least_engines}: must be 1 to the {options.fleet} of --fleet")
    for name in ("start_s", "restart_s", "target_work_s", "target_running"):
        value, may_be_0 = getattr(options, name), name.endswith("start_s")
        if value is not None and not (0 < value < float("inf") or (may_be_0 and value == 0)):
            limit = "at least 0" if may_be_0 else "above 0"
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be a number {limit}")
    policies(options.policy)
    scalings(options.autoscale)
    deaths(options)


def policies(text: str) -> Sequence[str]:
    """The rules of a comma-separated list, or all of them. Raises `ConfigError`."""
    return _of_list("--policy", text, tuple(POLICIES))


def scalings(text: str) -> Sequence[str]:
    """As `policies`, the rules for the number of engines."""
    return _of_list("--autoscale", text, (FIXED, *SCALING_RULES))


def _of_list(option: str, text: str, known: Sequence[str]) -> Sequence[str]:
    if text == "all":
        return known
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {text}: {name!r} is no rule; must be of {', '.join(known)}, or all")
    return names


def scaling_of(options: argparse.Namespace, engine: RecordedEngine, name: str) -> Scaling | None:
    """The rule of that name; None for always all engines."""
    if name == FIXED:
        return None
    running = options.target_running or MOST_BUSY * engine.max_num_seqs
    return Scaling(SCALING_RULES[name](options.target_work_s, running), options.least_engines, options.start_s)


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
    autoscale: str,
) -> dict[str, float | int | None]:
    """The results of a trace with one rule of the router and one for the number of engines."""
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
        scaling = scaling_of(options, engine, autoscale)
        return FleetSimulation(by_engine, engine, POLICIES[policy](), lost, scaling).run(trace).summary()
