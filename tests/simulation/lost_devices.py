"""Runs in which an asynchronous device is lost at a random step, with attended steps and drafts, in virtual time.

The device fails, or hangs after a failure, or hangs in silence. Before that, in some runs, a step is slow and a later
one slower, which is no loss. Inline, health must turn dead within two seconds of the first step that fails, or of the
beginning of one that does not end, and each request ends once; both limits grow with the longest step so far. With two
processes the engine process must be replaced, and each request gets the tokens of its right answer, none twice.

In full: `python -m tests.simulation.lost_devices --seeds 2000`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, product
from random import Random
from typing import Any

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import JobBlocks, JobHangs
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.device.device import Device
from millrace.stages.device.device_guard import PROBE_S
from millrace.stages.device.step_watch import LEAST_RATE, USUAL_FACTOR, work_of
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import Failed, Unavailable
from millrace.stages.outputs import ModelInfo
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.testing.scripted.async_device import AsyncScriptedDevice, AsyncScriptedModel
from millrace.stages.testing.scripted.engine import _async_model, _loaded, _resolved
from tests.simulation.memory_link import in_memory
from tests.simulation.setups import Setup, draw_setup, on_streams
from tests.simulation.world import QUIET_S, Report, World, _require

LIMIT_S = 2.0  # from the failure of a step to what health says
STEPS_IN_FLIGHT = (1, 2, 4)
ATTENDED_SHARES = (0.0, 0.2, 0.5)
SLOW_SHARE = 0.4  # of devices with a slow step before the loss
SLOW_S = (1.0, 1.8)  # a slow step, and how much longer a later one takes: a device is well if it goes on after 1.9
STEP_OPERATIONS = 16  # of the device, in a step, about
ERROR = "CUDA error: an illegal memory access was encountered"


def losing(setup: Setup, steps_in_flight: int) -> Setup:
    """The run without other faults, on a device with short steps: a probe also waits for those in flight."""
    setup = on_streams(setup, steps_in_flight)
    config = replace(setup.config, max_parked_s=1e6)
    return replace(setup, config=config, faults={}, ends="all", device_delay_s=min(setup.device_delay_s, 0.01))


def _block() -> None:
    raise JobHangs


class Losses:
    """Plants the losses of a run's devices, and measures how soon each is known."""

    def __init__(self, setup: Setup, env: SimEnv) -> None:
        self.dice = Random(f"lost/{setup.seed}/{setup.config.steps_in_flight}")
        self.num_left = self.dice.choice((1, 1, 1, 2))
        self.env = env
        self.devices: list[Device] = []
        self.failed_at: float | None = None  # the first step of the present device
        self.pending: dict[int, float] = {}  # steps of the present device in flight, and when they were submitted
        self.ended_at = 0.0  # the last step that ended
        self.work: dict[int, int] = {}  # tokens of each step, as the watch counts them
        self.slow: dict[int, float] = {}  # seconds that a step takes, by its number among the device's
        self.slow_until = 0.0  # the present one
        self.longest_s = 0.0  # of the device's slow steps so far
        self.failed_limit_s = LIMIT_S
        self.states: Counter[str] = Counter()

    def plant(self, model: AsyncScriptedModel, device: Device) -> None:
        """Loses the device after some operations, at a step from the first to about the hundredth."""
        model._attended_share = self.dice.choice(ATTENDED_SHARES)
        self.devices.append(device)
        if not self.num_left:
            return
        self.num_left -= 1
        hangs, refuses = self.dice.random() < 0.4, self.dice.random() < 0.5
        num_operations = int(10 ** self.dice.uniform(0.5, 3.3))
        is_silent = Random(f"silent/{num_operations}/{refuses}").random() < 0.3
        hang = _block if hangs or is_silent else None
        model.streams.lose_after(
            num_operations, RuntimeError(ERROR), hang, refuses=refuses and not is_silent, is_silent=is_silent
        )
        self.streams, self.failed_at, self.longest_s = model.streams, None, 0.0
        self._slow_down(device, num_operations)
        self._watch(device)
        guard = device.guard
        assert guard is not None
        begin = guard.begin

        def note_and_begin(step: int, error: BaseException) -> Any:
            if self.failed_at is None and guard.lost is None:
                self.failed_at = self.env.now()
                self.failed_limit_s = max(LIMIT_S, LIMIT_S * self.longest_s * len(self.pending) + LIMIT_S - PROBE_S)
                self.states["hangs" if hangs else "fails"] += 1
            return begin(step, error)

        guard.begin = note_and_begin  # type: ignore[method-assign]

    def _slow_down(self, device: Device, num_operations: int) -> None:
        """Draws slow steps. A probe waits for the one that runs, as on a GPU."""
        dice = Random(f"slow/{self.dice.random()}")
        first, slow_s = int(dice.random() * num_operations / STEP_OPERATIONS), dice.uniform(*SLOW_S)
        later = first + dice.randint(1, 6), slow_s * dice.uniform(*SLOW_S)
        self.slow = dict([(first, slow_s), later][: dice.choice((1, 2))] if dice.random() < SLOW_SHARE else [])
        numbers, self.slow_until = count(), 0.0
        assert isinstance(device, AsyncScriptedDevice) and device.guard is not None
        finish, probe, slow = device._finish, device.guard._probe, self.slow
        by_step: dict[int, int] = {}

        def slow_finish(grant: Any, submitted: Any) -> Any:
            number = by_step[grant.step] = by_step[grant.step] if grant.step in by_step else next(numbers)
            if slow_s := slow.pop(number, 0.0):
                self.slow_until, self.longest_s = self.env.now() + slow_s, max(self.longest_s, slow_s)
                self.states["slow"] += 1
                raise JobBlocks(slow_s)
            return finish(grant, submitted)

        def slow_probe() -> None:
            if (left_s := self.slow_until - self.env.now()) > 0:
                raise JobBlocks(left_s)
            probe()

        device._finish = slow_finish  # type: ignore[method-assign]
        device.guard._probe = slow_probe

    def _watch(self, device: Device) -> None:
        """Notes which steps are in flight, and since when."""
        sample, self.pending = device.sample, {}
        results: dict[int, asyncio.Future[Any]] = {}

        def note_and_sample(grant: Any, run: Any) -> Any:
            result = results[grant.step] = sample(grant, run)
            self.pending[grant.step] = self.env.now()
            self.work[grant.step] = work_of(grant)
            result.add_done_callback(note_end)
            return result

        def note_end(_: object) -> None:
            if device.guard is not None and device.guard.lost is None:  # else the step was given up
                self.pending = {step: since for step, since in self.pending.items() if not results[step].done()}
                self.ended_at = self.env.now()

        device.sample = note_and_sample  # type: ignore[method-assign]

    def note_told(self) -> None:
        """Health has said that the device is lost."""
        _require(self.streams.is_lost, f"health said that a device is lost which is slow: {self.longest_s:.3f} s")
        since, what, limit_s = self.failed_at, "the first failed step", self.failed_limit_s
        if since is None:
            self.states["silent"] += 1
            # a check that a slow step began may find the loss after that step ended, before the next one fails
            since = max(self.ended_at, min(self.pending.values(), default=0.0))
            what = "the beginning of a step that does not end" if self.pending else "the end of the last step"
            num_tokens = sum(self.work[step] for step in self.pending)
            limit_s = LIMIT_S * max(1.0, USUAL_FACTOR * self.longest_s, num_tokens / LEAST_RATE)
        took_s = self.env.now() - since
        _require(took_s <= limit_s, f"health said {took_s:.3f} s after {what} that the device is lost")
        self.states["told"] += 1


class LosingWorld(World):
    """One process whose device is lost."""

    def __init__(self, setup: Setup, env: SimEnv) -> None:
        super().__init__(setup, env)
        self.losses = Losses(setup, env)
        model, pipeline = self.parts.model, self.parts.pipeline
        assert isinstance(model, AsyncScriptedModel)
        self.losses.plant(model, self.parts.device)
        pipeline.on_dead.append(self._told)

    def _told(self) -> None:
        health = self.parts.pipeline.health
        self.losses.note_told()
        _require(ERROR in (health.reason or "") or "has not answered" in (health.reason or ""), str(health))

    async def live(self) -> Report:
        report = await super().live()
        told, silent = self.losses.states["told"], self.losses.states["silent"]
        lost = self.losses.failed_at is not None or silent > 0
        _require(told == lost, f"{lost} lost devices, and health was told of {told}: {report.health}")
        _require(not self.losses.pending or report.health == "dead", f"steps never ended: {self.losses.pending}")
        report.states += self.losses.states
        return report

    def _allowed_outcomes(self) -> set[str]:
        return {"NotServing", Unavailable.__name__} if self.losses.states["told"] else set()


class SplitWorld(World):
    """Two processes on one loop. The device of the engine process is lost, and so may that of its successor."""

    def __init__(self, setup: Setup, env: SimEnv) -> None:
        self.losses = Losses(setup, env)
        super().__init__(setup, env)

    def _build(self) -> Any:
        """Nothing yet: `live` starts the engine."""

    async def live(self) -> Report:
        with in_memory(self.env, self._load):
            engine = _split_engine(self.setup.config, self, self.env)
            await engine.start()
            try:
                return await self._live(engine)
            finally:
                await engine.stop()
                await self.env.aclose()
                self.failure.cancel()

    async def _live(self, engine: Engine) -> Report:
        self.parts: Any = engine.core.front
        self.parts.exit.on_end.append(lambda box, cause, error: self._on_end(box.request_id, cause))
        keeper = engine.core.processes.cores[0].keeper
        assert keeper is not None
        note_broken = keeper.note_broken

        def note_and_tell(reason: str) -> None:
            note_broken(reason)
            assert not engine.health.is_ready
            self.losses.note_told()

        keeper.note_broken = note_and_tell  # type: ignore[method-assign]
        clients = [asyncio.create_task(self._serve(client), name="client") for client in self.setup.clients]
        histories = await asyncio.gather(*clients)
        await self.env.sleep(QUIET_S)
        self.report.health = engine.health.state
        _require(engine.health.is_ready, f"at the end: {engine.health}")
        self._check_histories(histories)
        num_told = self.losses.states["told"]
        _require(engine.num_deaths == num_told, f"{engine.num_deaths} deaths, {num_told} of them by a lost device")
        _require(not self.parts.exit.live, f"requests are left: {sorted(self.parts.exit.live)}")
        self.report.states += self.losses.states
        return self.report

    def _allowed_outcomes(self) -> set[str]:
        """A request that ran alone in two deaths counts as their cause."""
        return {Failed.__name__} if self.losses.states["told"] > 1 else set()

    def _load(self, config: EngineConfig, env: Any, phases: Phases) -> tuple[Any, Device]:
        model = _async_model(config, self.script, self.env)
        device = AsyncScriptedDevice(model)
        self.losses.plant(model, device)
        return _loaded(config, model), device


def _split_engine(config: EngineConfig, world: SplitWorld, env: SimEnv) -> Engine:
    """A split engine without model files: each process gets a scripted device."""

    async def read_text(config: EngineConfig, phases: Phases, env: Any) -> Callable[[ModelInfo], Any]:
        loaded = _loaded(config, _async_model(config, world.script, env))
        return lambda info: replace(loaded, info=info)

    core = partial(RemoteCore, read_text=read_text, warm_up=None)
    return Engine(_resolved(config, {}), core=core, env=env)


def run_lost_seed(seed: int, steps_in_flight: int, *, is_split: bool) -> Report:
    """Runs one seed. Raises what is wrong, with a note on how to repeat the run."""
    setup = losing(draw_setup(seed), steps_in_flight)
    world = SplitWorld if is_split else LosingWorld

    async def main(env: SimEnv) -> Report:
        return await world(setup, env).live()

    try:
        with captured_logs():
            delays = {name: (0.0, setup.device_delay_s) for name in ("device", "completion")}
            result = run(main, seed=seed, policy=setup.policy, worker_delay_s=delays, max_callbacks=3_000_000)
        _require(not result.leaked_tasks, f"I7: tasks outlived the run: {result.leaked_tasks}")
    except BaseException as error:
        mode = "split" if is_split else "inline"
        error.add_note(
            f"again: python -m tests.simulation.lost_devices --seed {seed} --late {steps_in_flight} --{mode}"
        )
        raise
    return result.value


def main() -> int:
    """Prints totals, and each failing seed with the command that repeats it."""
    parser = argparse.ArgumentParser(description="Simulate devices that are lost at a random step.")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--late", type=int, nargs="+", default=list(STEPS_IN_FLIGHT), help="steps in flight")
    parser.add_argument("--inline", action="store_true", help="one process only")
    parser.add_argument("--split", action="store_true", help="two processes only")
    options = parser.parse_args()
    modes = [mode for mode in (False, True) if options.inline == options.split or mode == options.split]
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    failures, states, outcomes = 0, Counter[str](), Counter[str]()
    for seed, steps_in_flight, is_split in product(seeds, options.late, modes):
        try:
            report = partial(run_lost_seed, is_split=is_split)(seed, steps_in_flight)
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}\n    {'; '.join(error.__notes__)}")
            if options.seed is not None:
                raise
            continue
        states += report.states
        outcomes += report.outcomes
        states[("split " if is_split else "inline ") + report.health] += 1
    print(f"{failures} failed; outcomes: {dict(sorted(outcomes.items()))}; states: {dict(sorted(states.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
