"""`millrace chaos`: runs a fleet on loopback under strikes, and checks what its clients saw."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ....runtime.env.writable import folder_problem
from ....stages.config import EngineConfig
from ....stages.errors import ConfigError
from ...config import ServerConfig
from ...output_file import check_output_file, write_output_file
from .balancer import Balancer
from .cases import Case, draw_cases, learn
from .checks import check_answers, check_errors, check_logs
from .clients import Clients
from .costs import describe
from .fleet import REFERENCE_FLAGS, ChaosFleet, FleetSize
from .history import ClientRequest, to_json_lines
from .members import FleetMember
from .plan import PLANS, Plan, drawn, read_plan
from .rest import check_rest
from .strikes import Striker, StrikeSpan
from .version_edits import drop_fields

STOPPED = 128 + signal.SIGTERM
AT_ONCE = 4  # requests to the reference, whose memory is far larger
LAME_DUCK_S = 3.0  # several times as long as the balancer takes to see it
ANSWER_S = 180.0  # after the last strike, for the answers that are still due


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What to run. `has_reference`: the right answers come from a server of their own, not from the fleet at rest."""

    size: FleetSize
    seed: int
    minutes: float
    plan: Plan
    num_clients: int = 32
    rate: float = 8.0  # requests a second
    num_cases: int = 24
    has_reference: bool = True


@dataclass(slots=True)
class ChaosResult:
    """What a run showed."""

    violations: list[str] = field(default_factory=list)
    requests: list[ClientRequest] = field(default_factory=list)
    spans: list[StrikeSpan] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of the report


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 if nothing was violated, else 1; 143 after SIGTERM."""
    size = FleetSize.parse(options.fleet)
    if not 0.0 < options.minutes <= 24 * 60 or options.clients < 1 or not 0.0 < options.rate <= 1000.0:
        raise ConfigError("--minutes, --clients and --rate must be positive, at most a day and 1000 requests a second")
    plan = _plan(options, size)
    check_output_file("--save-history", options.save_history)
    if options.log_dir is not None and (problem := folder_problem(options.log_dir)) is not None:
        raise ConfigError(f"--log-dir {options.log_dir}: {problem}")
    chaos = ChaosOptions(
        size=size,
        seed=options.seed,
        minutes=options.minutes,
        plan=plan,
        num_clients=options.clients,
        rate=options.rate if plan.rate is None else plan.rate,
    )
    again = f"millrace chaos --fleet {size} --seed {options.seed} --minutes {options.minutes:g}"
    again += "" if options.plan is None else f" --plan {shlex.quote(options.plan)}"
    folder = options.log_dir or Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
    print(f"seed {options.seed}: {size}, logs in {folder}", flush=True)
    try:
        result = asyncio.run(run_chaos(chaos, folder, again))
    except asyncio.CancelledError:
        print("stopped by a signal; all its processes are killed", flush=True)
        return STOPPED
    print("\n".join(result.lines), flush=True)
    if options.save_history is not None:
        write_output_file("--save-history", options.save_history, to_json_lines(result.requests))
    if not result.violations and options.log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if result.violations else 0


def _plan(options: argparse.Namespace, size: FleetSize) -> Plan:
    if options.plan is None:
        return drawn(size, options.seed, options.minutes)
    return PLANS[options.plan](size) if options.plan in PLANS else read_plan(Path(options.plan), size)


async def run_chaos(options: ChaosOptions, folder: Path, again: str = "") -> ChaosResult:
    """One run, from the start of the processes to their end; they are killed if it fails. Logs go to `folder`."""
    result = ChaosResult()
    cases = draw_cases(random.Random(f"cases {options.seed}"), options.num_cases)
    leaves = any(one.kind == "upgrade" and one.engine is None for one in options.plan.strikes)
    lame_duck_s = LAME_DUCK_S if leaves else 0.0
    fleet = ChaosFleet(options.size, options.seed, folder, options.plan.wall_clocks, lame_duck_s)
    if options.plan.drops_fields:
        for relay in list(fleet.relays.values())[::2]:
            relay.edits = drop_fields
    async with _stops_at_signals(), _reference(options, folder) as reference:
        ticking = asyncio.create_task(fleet.clock.tick(), name="clock")
        try:
            await asyncio.gather(fleet.start(), *([] if reference is None else [reference.start()]))
            if reference is not None:
                await _learn(reference.ready["url"], cases, AT_ONCE)
            else:
                await _learn(fleet.fronts[0].ready["url"], cases, 1)
            if reference is not None:
                reference.end_all()
            await _strike_and_ask(options, fleet, cases, result)
            result.violations += await check_rest(fleet)
            result.violations += await fleet.stop()
        finally:
            ticking.cancel()
            await fleet.aclose()
    links = fleet.links
    result.violations += check_answers(result.requests)
    result.violations += check_errors(result.requests, result.spans, links, options.size)
    result.violations += links.violations() + check_logs(fleet.members)
    result.violations += [f"{span.strike}: {one}" for span in result.spans for one in span.problems]
    result.lines = describe(result.spans, result.requests, links, result.violations, again)
    if fleet.clock.lost_s > 1.0:
        result.lines.insert(-1, f"the machine stood still for {fleet.clock.lost_s:.0f} s")
    return result


async def _strike_and_ask(options: ChaosOptions, fleet: ChaosFleet, cases: list[Case], result: ChaosResult) -> None:
    balancer = Balancer(fleet)
    clients = Clients(balancer, fleet.clock, cases, options.seed, options.num_clients, options.rate)
    striker = Striker(fleet, balancer, options.plan)
    result.requests, result.spans = clients.histories, striker.spans
    balancer.start()
    clients.start()
    end_s = fleet.clock.now() + 60.0 * options.minutes
    try:
        await striker.run()
        if options.plan.num_requests is not None:
            await clients.wait_for(options.plan.num_requests)
        elif not options.plan.in_turn:
            await asyncio.sleep(max(0.0, end_s - fleet.clock.now()))
        await clients.stop(ANSWER_S)
    finally:
        await clients.aclose()
        await balancer.aclose()


async def _learn(url: str, cases: list[Case], at_once: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        await learn(session, url, cases, at_once)


@asynccontextmanager
async def _reference(options: ChaosOptions, folder: Path) -> AsyncIterator[FleetMember | None]:
    """A server for the right answers: not started yet."""
    if not options.has_reference:
        yield None
        return
    member = FleetMember("reference", ("serve", "--port", "0", *REFERENCE_FLAGS, "--log-format", "json"), folder)
    try:
        yield member
    finally:
        member.end_all()


@asynccontextmanager
async def _stops_at_signals() -> AsyncIterator[None]:
    """SIGTERM ends the run as SIGINT does, so that its processes are killed."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
