"""Runs of a fleet in virtual time: one front, two to four engine processes, and what befalls them and their links.

All processes share one simulated loop; the engine processes, their clients and links are the real ones (see
`memory_link.py`). A run draws strikes: a process dies at once, a link breaks, stands still one way or both, or is slow,
starts fail, a process is drained, and a request kills each process that runs it. Answers are hashes, so the right one
is known. The checks besides those of `world.py`:

    I15  a request is in no more than one process whose link is open, and in none that is known to be lost
    I16  at rest no process knows a request, the front's table is empty, and its index has the keys that each process
         has cached
    I17  the first new token of a resumed answer is the next one
    I18  nothing is left on the edges of a lost link
    I19  a process that serves gets requests: none fails, and none is refused, while one is left
    I20  a request that kills ends at most two processes, three if one ended before the news that it ran, and no other
         request ends for it
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from millrace.runtime.env.log import captured_logs
from millrace.runtime.pipeline import NotServing
from millrace.runtime.simulation.run import SimEnv, SimResult, run
from millrace.stages.config import EngineConfig
from millrace.stages.engine.core import EngineSetup
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import Failed, Unavailable
from millrace.stages.fleet.fleet_processes import FleetProcesses
from millrace.stages.fleet.hosts import HereHosts
from millrace.stages.fleet.placement import Place
from millrace.stages.messages import StepTokens, TokenRequest
from millrace.stages.outputs import ModelInfo
from millrace.stages.routing.reports import KEY_BYTES
from millrace.stages.split.engine_core import EngineCore
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.testing.scripted.engine import _async_model, _check_violations, _device, _loaded, _model, _resolved
from tests.simulation.memory_link import MemoryChild, in_memory
from tests.simulation.setups import POLICIES as ONE_PROCESS
from tests.simulation.setups import Setup, draw_setup, on_streams
from tests.simulation.world import QUIET_S, Broken, Report, World, _require

STRIKES = (
    "core.die",
    "link.cut",
    "link.half",
    "link.partition",
    "link.stall",
    "core.slow",
    "start.fails",
    "front.slow",
    "core.drain",
    "core.migrate",
)
POISON = "request.poison"
TICK_S = 0.5  # between two checks of the front whether its processes make progress
HANG_S = 90.0  # that a link may stand still: three times what the front waits
MAX_FAILED_STARTS = 3
MOST_CLIENTS = 16
POLICIES = (*ONE_PROCESS, "starve:merge", "starve:merge", "starve:dispatch")


@dataclass(frozen=True)
class Strike:
    """What befalls the process `core`, or the one with the most requests, at `at_s` or after `at_step` steps."""

    kind: str
    core: int | None
    at_s: float
    seconds: float  # for which a link stands still, or is slow
    at_step: int | None = None


@dataclass(frozen=True)
class FleetSetup:
    """All of a run that its seed draws, but the order of events."""

    setup: Setup
    strikes: tuple[Strike, ...]
    poison: str | None  # the request that kills each process that runs it
    delays: float  # probability that a stage receives later
    group_from: int  # suspects, of more than which several are tried together


def draw_fleet(seed: int) -> FleetSetup:
    """The run of `seed`."""
    dice = Random(f"fleet/{seed}")
    setup = draw_setup(seed)
    if dice.random() < 0.5:
        setup = on_streams(setup, dice.choice((1, 2, 4)))
    count = dice.choice((2, 2, 3, 4))
    config = replace(setup.config, max_parked_s=1e6, data_parallel_size=count, max_admitted_requests=1000)
    delay_s = min(setup.device_delay_s, 0.05)
    policy = dice.choice(POLICIES)
    clients = setup.clients[:MOST_CLIENTS]
    setup = replace(setup, config=config, policy=policy, faults={}, ends="all", device_delay_s=delay_s, clients=clients)
    strikes = []
    for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 5))):
        at_s = dice.choice(clients).arrival_s + dice.choice((dice.uniform(0.0, 0.06), dice.uniform(0.0, 5.0)))
        seconds = dice.choice((0.02, 1.0, HANG_S, HANG_S)) * dice.random()
        core = dice.choice((None, dice.randrange(count)))
        at_step = dice.choice((None, dice.randrange(40)))
        strikes.append(Strike(dice.choice(STRIKES), core, at_s, seconds, at_step))
    poison = dice.choice(setup.clients).request.request_id if dice.random() < 0.3 else None
    delays = dice.choice((0.0, 0.02, 0.3))
    group_from = dice.choice((0, 2, 8))
    return FleetSetup(setup, tuple(sorted(strikes, key=lambda strike: strike.at_s)), poison, delays, group_from)


class FleetWorld(World):
    """A fleet in a simulated env, with its clients, and its checks."""

    def __init__(self, drawn: FleetSetup, env: SimEnv) -> None:
        self.drawn = drawn
        self.children: list[FleetChild] = []
        self.num_starts_to_fail = 0
        self.num_loads = 0
        self.kills: Counter[str] = Counter()  # processes that a request has ended
        self.guilty: set[str] = set()
        self.known: dict[int, int] = {}  # tokens of each sequence so far
        self.num_steps_come = 0
        self.slow_until_s = 0.0  # the front merges nothing before
        self.strikes: Counter[str] = Counter()
        super().__init__(drawn.setup, env)

    def _build(self) -> Any:
        """Nothing yet: `live` starts the engine."""

    async def live(self) -> Report:
        kind = type("WorldChild", (FleetChild,), {"world": self})
        with in_memory(self.env, self._load_nothing, kind):
            engine = self.engine = SimFleet(self.setup.config, self, env=self.env)
            await engine.start()
            try:
                return await self._live(engine)
            finally:
                await engine.stop()
                await self.env.aclose()
                self.failure.cancel()

    def _load_nothing(self, *_: Any) -> Any:
        raise AssertionError("each child loads for itself")

    async def _live(self, engine: SimFleet) -> Report:
        self.parts: Any = engine.core.front
        self.parts.exit.on_end.append(lambda box, cause, error: self._on_end(box.request_id, cause))
        merge = self.parts.merge.handle

        async def wait_and_merge(batch: Any, out: Any) -> None:
            await self.env.sleep(max(0.0, self.slow_until_s - self.env.now()))
            await merge(batch, out)

        self.parts.merge.handle = wait_and_merge
        ticking = asyncio.create_task(self._tick(), name="tick")
        striking = asyncio.create_task(self._strike_all(), name="strikes")
        clients = [asyncio.create_task(self._serve(client), name="client") for client in self.setup.clients]
        everything = asyncio.gather(*clients, striking)
        try:
            await asyncio.wait([everything, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                everything.cancel()
                await asyncio.gather(everything, return_exceptions=True)
                self.failure.result()
            histories = everything.result()[:-1]
            await self.env.sleep(QUIET_S)
            if self.failure.done():
                self.failure.result()
        finally:
            for task in (ticking, striking, *clients):
                task.cancel()
            await asyncio.wait([ticking, striking, *clients])
        self.report.health = engine.health.state
        _require(engine.health.is_ready, f"at the end: {engine.health}")
        self._check_histories(histories)
        self._check_rest()
        self.report.states += self.strikes
        self.report.states["deaths"] += engine.num_deaths
        self.report.states["guilty"] += len(self.guilty)
        self.report.num_steps = sum(child.model.num_steps for child in self.children if child.model is not None)
        return self.report

    async def _tick(self) -> None:
        while True:
            await self.env.sleep(TICK_S)
            self.engine.core.check_processes(0.0)
            for child in self.children:  # the watch of a pipeline does not tick in virtual time
                if not child.is_killed:
                    child.report()
            self.check_owners()

    # -- strikes

    async def _strike_all(self) -> None:
        now_s = 0.0
        for strike in (strike for strike in self.drawn.strikes if strike.at_step is None):
            await self.env.sleep(strike.at_s - now_s)
            now_s = strike.at_s
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        loads = {
            core.index: self.engine.core.processes.table.load_of(core.index)
            for core in self.engine.core.processes.cores
        }
        busiest = max(loads, key=lambda index: (loads[index].num_requests, index))
        core = self.engine.core.processes.cores[busiest if strike.core is None else strike.core]
        child = self.child_of(core)
        if strike.kind == "start.fails":
            self.num_starts_to_fail = min(MAX_FAILED_STARTS, self.num_starts_to_fail + 1)
            if child is not None:
                child.kill()
        if child is None or (ends := self.ends_of(core)) is None:
            return
        sock, theirs = ends
        self.strikes[strike.kind] += 1
        self.env.note("strike", strike.kind, core.index)
        match strike.kind:
            case "core.die":
                child.kill()
            case "core.drain" | "core.migrate":
                by = "finish" if strike.kind == "core.drain" else "migrate"
                self.engine.drain_engine(core.index, by)
            case "front.slow":
                self.slow_until_s = self.env.now() + min(strike.seconds, 1.0)
            case "link.cut":
                theirs.cut()
            case "link.half" | "core.slow":
                sock.hold(strike.seconds if strike.kind == "link.half" else min(strike.seconds, 1.0))
            case "link.stall":
                theirs.hold(min(strike.seconds, 20.0))
            case "link.partition":
                sock.hold(strike.seconds)
                theirs.hold(strike.seconds)
                self.note_partition(child, strike.seconds)

    def child_of(self, core: EngineCore) -> Any:
        """The process of a core, or None."""
        child: Any = None if core.client is None else core.client._child
        return child if isinstance(child, FleetChild) else None

    def ends_of(self, core: EngineCore) -> tuple[Any, Any] | None:
        """Both ends of the connection to a process, or None."""
        child = self.child_of(core)
        return None if child is None else (child.sock, child.theirs)

    def requests_in(self, core: EngineCore) -> set[str]:
        """The requests that a process knows from its present link."""
        child = self.child_of(core)
        return set() if child is None else set(child.process._exit.live)

    def note_partition(self, child: Any, seconds: float) -> None:
        """Nothing passes to and from a process for so long."""

    def note_step(self, child: Any, grant: Any) -> None:
        """A step begins: it ends the process if it starts the poison."""
        poison = self.drawn.poison
        if (
            not child.is_killed
            and poison is not None
            and any(child.name_of(started.request_id) == poison for started in grant.started)
        ):
            self.kills[poison] += 1
            self.strikes[POISON] += 1
            live = self.engine.core.processes.table._live.get(poison)
            most = 2 if live is None or not live.num_deaths_unrun else 3
            _note(self, self.kills[poison] <= most, f"I20: {poison} has ended {self.kills[poison]} processes of {most}")
            child.kill()

    # -- checks

    def check_owners(self) -> None:
        """I15 and I18."""
        owners: Counter[str] = Counter()
        for core in self.engine.core.processes.cores:
            if core.client is not None and core.client.is_open:
                owners.update(self.requests_in(core) & self.parts.exit.live.keys())
        several = [request_id for request_id, count in owners.items() if count > 1]
        _note(self, not several, f"I15: {several} are in several processes at once")
        for core in self.engine.core.processes.cores:
            is_lost = core.client is None or not core.client.is_open
            _note(self, not (is_lost and core.tokens.num_owed), f"I18: credits for the lost link of {core.index}")
            is_dirty = is_lost and core.keeper is not None and core.keeper.away is not None and len(core.requests)
            _note(self, not is_dirty, f"I18: prompts wait for the lost link of {core.index}")

    def note_tokens(self, step: StepTokens, core: int) -> None:
        """I17, for each step that arrives."""
        for sequence_id, place in zip(step.sequence_ids.tolist(), step.places.tolist(), strict=True):
            due = self.known.get(sequence_id, 0)
            _note(self, place == due, f"I17: token {place} of sequence {sequence_id} came from {core}, {due} was due")
            self.known[sequence_id] = place + 1
        self.num_steps_come += 1
        for strike in self.drawn.strikes:
            if strike.at_step == self.num_steps_come:
                self._strike(strike)

    def _check_rest(self) -> None:
        """I16."""
        engine = self.engine
        _require(not self.parts.exit.live, f"I16: requests are left: {sorted(self.parts.exit.live)}")
        _require(
            not engine.core.processes.table.request_ids(),
            f"I16: the table has {engine.core.processes.table.request_ids()}",
        )
        _require(not any(one["num_requests"] or one["work"] for one in engine.engines), f"I16: {engine.engines}")
        _require(not self.parts.detokenize.num_sequences, "I16: detokenize still knows sequences")
        for core in engine.core.processes.cores:
            child = self.child_of(core)
            if child is None or not core.is_serving:
                continue
            process, where = child.process, f"I16: process {core.index}"
            assert process._loop is not None
            pool, scheduler = process._loop.core.allocate.allocator.pool, process._loop.core.schedule.scheduler
            _require(not process._exit.live, f"{where} knows {sorted(process._exit.live)}")
            _require(not scheduler.sequences, f"{where} still has sequences {sorted(scheduler.sequences)}")
            _require(pool.num_in_use == 0 and pool.num_quarantined == 0, f"{where} uses {pool.num_in_use} blocks")
            depths = {name: len(channel) for name, channel in process._loop.pipeline.channels.items() if len(channel)}
            _require(not depths, f"{where} has items on {depths}")
            process._loop.core.allocate.allocator.check()
            self._check_keys(core.index, process._loop.core.allocate.allocator.cache)
            scheduler.check()
            _check_violations(child.model)

    def _check_keys(self, core: int, cache: Any) -> None:
        held = (
            set()
            if cache is None
            else {key[:KEY_BYTES] for tier in (cache._device, cache._host) for key in tier.blocks}
        )
        told = self.engine.core.processes.router.held_by(core)
        _require(told == held, f"I16: {len(told)} keys are indexed of process {core}, which has cached {len(held)}")
        self.report.states["keys"] += len(held)

    def _allowed_outcomes(self) -> set[str]:
        return {Failed.__name__}

    def _check_outcome(self, history: Any) -> None:
        super()._check_outcome(history)
        request_id = history.client.request.request_id
        if history.outcome in (Failed.__name__, Unavailable.__name__, NotServing.__name__):
            is_told = request_id in self.guilty
            _require(is_told, f"I19: {request_id} failed: {getattr(history, 'error', '')}; guilty: {self.guilty}")
            self.report.states["blamed"] += request_id != self.drawn.poison
            has_struck = bool(self.drawn.strikes)  # at a moment in which it was on trial
            _require(request_id == self.drawn.poison or has_struck, f"I20: {request_id} ended for another request")


class FleetChild(MemoryChild):
    """An engine process in memory, with a scripted device of its own."""

    world: FleetWorld

    def __init__(self, *ends: Any) -> None:
        self.model: Any = None
        self.is_killed = False  # its code may run to the end of a turn
        self.world.children.append(self)
        super().__init__(*ends)

    def kill(self) -> None:
        """As SIGKILL: nothing more leaves the process."""
        self.is_killed = True
        self.theirs.cut()
        super().kill()

    def report(self) -> None:
        """Tells the front what its router asks."""
        self.process.report_to_router()

    def name_of(self, request_id: str) -> str:
        """The front's name of a request."""
        return request_id

    def _load(self, config: EngineConfig, env: Any, phases: Any) -> Any:
        return load_scripted(self.world, self, config, config.data_parallel_size)


def load_scripted(world: FleetWorld, child: Any, config: EngineConfig, num_first: int) -> Any:
    """A scripted model and its device for a process. Raises OSError for a start that is to fail; none of the first."""
    world.num_loads += 1
    if world.num_loads > num_first and world.num_starts_to_fail:
        world.num_starts_to_fail -= 1
        raise OSError(12, "Cannot allocate memory")
    make = _async_model if world.setup.is_async else _model
    child.model = make(config, world.script, world.env)
    device = _device(child.model)
    forward = device.forward

    def note_and_forward(grant: Any, run: Any) -> Any:
        world.note_step(child, grant)
        return forward(grant, run)

    device.forward = note_and_forward  # type: ignore[method-assign]
    return _loaded(config, child.model), device


class SimFleet(Engine):
    """A fleet without model files."""

    def __init__(self, config: EngineConfig, world: FleetWorld, env: SimEnv) -> None:
        async def read_text(config: EngineConfig, phases: Any, env: Any) -> Callable[[ModelInfo], Any]:
            loaded = _loaded(config, _model(config, world.script, env))
            return lambda info: replace(loaded, info=info)

        processes = partial(FleetProcesses, make_hosts=SimHosts)
        core = partial(RemoteCore, make_processes=processes, read_text=read_text, warm_up=None)
        super().__init__(_resolved(config, {}), core=core, env=env)
        watch_requests(self, world)


def watch_requests(engine: Any, world: FleetWorld) -> None:
    """Checks what the front's table of requests is told."""
    table = engine.core.processes.table
    table.group_from = world.drawn.group_from
    note, note_death, sent = table.note, table.note_death, table.sent

    def note_and_check(step: StepTokens, core: int = 0) -> None:
        world.note_tokens(step, core)
        note(step, core)

    def note_guilty(core: int = 0) -> str | None:
        guilty: str | None = note_death(core)
        _note(world, table.is_idle(core), f"I15: requests are left in the lost process {core}")
        if guilty is not None:
            world.guilty.add(guilty)
        return guilty

    def check_and_send(request: TokenRequest, core: int | None = 0) -> None:
        sent(request, core)
        world.check_owners()

    table.note, table.note_death, table.sent = note_and_check, note_guilty, check_and_send


class SimHosts(HereHosts):
    """Without a look at this machine."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._places = [Place(setup.config)] * setup.config.data_parallel_size


def _note(world: FleetWorld, is_true: bool, complaint: str) -> None:
    """Ends the run unless it is true. Raised where it is seen, it would look like a bug of the code there."""
    if not is_true:
        world.fail(Broken(complaint))


def run_fleet_seed(
    seed: int, *, keep_trace: bool = False, make_world: type[FleetWorld] = FleetWorld, flags: str = ""
) -> SimResult[Report]:
    """Runs the fleet of `seed`. Raises `Broken` or another error, with a note on how to repeat the run."""
    drawn = draw_fleet(seed)

    async def main(env: SimEnv) -> Report:
        return await make_world(drawn, env).live()

    try:
        with captured_logs():
            delays = {name: (0.0, drawn.setup.device_delay_s) for name in ("device", "completion")}
            result = run(
                main,
                seed=seed,
                policy=drawn.setup.policy,
                fault_probability=1.0,
                fault_names={"channel.delay": drawn.delays} if drawn.delays else {},
                thread_delay_s=(0.0, drawn.setup.tokenize_delay_s),
                worker_delay_s=delays,
                max_callbacks=5_000_000,
                keep_trace=keep_trace,
            )
        _require(not result.leaked_tasks, f"I7: tasks outlived the run: {result.leaked_tasks}")
    except BaseException as error:
        error.add_note(f"again: python -m tests.simulation.run --fleet{flags} --seed {seed}")
        raise
    return result
