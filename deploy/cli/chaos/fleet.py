"""`ChaosFleet`: fronts and engines on loopback, and a relay in each link between them."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....stages.errors import ConfigError
from .awake_clock import AwakeClock
from .link_watch import LinkHistory, SpanWatch
from .members import FleetMember
from .relay import Relay

SIZE = re.compile(r"(\d+)x(\d+)")
KEY_BYTES = 32
STOP_S = 100.0  # for a process to end by itself: its own limit, and time on a busy machine
KILLED_ITSELF = 1  # exit status of a process whose stop took longer than its own limit
STOOD_STILL_S = 3.0  # what is left of that limit after the drain
# pools so small that sequences are preempted, one thread, and a pause in which a stopped process is not lost yet
ENGINE_FLAGS = (
    *("--threads", "1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"),
    *("--num-gpu-blocks", "48", "--num-cpu-blocks", "16", "--shutdown-timeout-s", "60", "--log-format", "json"),
)
FRONT_FLAGS = (
    *("--port", "0", "--shutdown-timeout-s", "60", "--max-unread-tokens", "64"),
    *("--log-format", "json"),
)
REFERENCE_FLAGS = ("--threads", "1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8")


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many fronts and engines."""

    num_fronts: int
    num_engines: int

    @classmethod
    def parse(cls, text: str) -> FleetSize:
        """Of FRONTSxENGINES. Raises `ConfigError`."""
        found = SIZE.fullmatch(text)
        size = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not (1 <= size.num_fronts <= 8 and 1 <= size.num_engines <= 8):
            raise ConfigError(f"--fleet {text}: must be FRONTSxENGINES, 1 to 8 each, such as 2x3")
        return size

    def __str__(self) -> str:
        return f"{self.num_fronts}x{self.num_engines}"


def front_name(index: int) -> str:
    return f"front{index}"


def engine_name(index: int) -> str:
    return f"engine{index}"


class ChaosFleet:
    """Call `start`, in the end `stop` and `aclose`. `folder` holds the key and the logs."""

    def __init__(
        self, size: FleetSize, seed: int, folder: Path, wall_clocks: Sequence[int] = (), lame_duck_s: float = 0.0
    ) -> None:
        """`wall_clocks`: seconds by which those of the processes are wrong, in turn; (): none is.

        `lame_duck_s`: that a front which leaves still takes requests, for the balancer to notice.
        """
        self.size, self.links, self._lame_duck_s = size, LinkHistory(), lame_duck_s
        self.clock = AwakeClock()
        key = folder / "fleet.key"
        key.write_bytes(os.urandom(KEY_BYTES))
        key.chmod(0o600)
        fleet = ("--fleet-key-file", str(key))
        self._fleet_flags = fleet
        self._folder = folder
        self._clocks = iter([*wall_clocks])
        self.engines = [self._engine(index) for index in range(size.num_engines)]
        self.fronts: list[FleetMember] = []
        self.relays: dict[tuple[int, int], Relay] = {
            (front, engine): Relay(
                random.Random(f"{seed} {front} {engine}"),
                partial(SpanWatch, self.links, self.clock, front_name(front), engine_name(engine)),
            )
            for front in range(size.num_fronts)
            for engine in range(size.num_engines)
        }

    def _engine(self, index: int) -> FleetMember:
        flags: tuple[str, ...] = (
            "engine",
            "--listen",
            "127.0.0.1:0",
            "--metrics-port",
            "0",
            *self._fleet_flags,
            *ENGINE_FLAGS,
        )
        if index % 2:
            flags = (*flags, "--drain-by", "migrate")
        if index == self.size.num_engines - 1:  # on which a disk matters
            flags = (*flags, "--record", str(self._folder / f"{engine_name(index)}.jsonl"))
        return FleetMember(engine_name(index), flags, self._folder, self._clock(engine_name(index)))

    def _front(self, index: int) -> FleetMember:
        addresses = (self.relays[index, engine].address for engine in range(self.size.num_engines))
        engines = (word for address in addresses for word in ("--engine", address))
        flags = ("route", *self._fleet_flags, *FRONT_FLAGS, "--lame-duck-s", f"{self._lame_duck_s:g}", *engines)
        return FleetMember(front_name(index), flags, self._folder, self._clock(front_name(index)))

    def _clock(self, name: str) -> dict[str, str]:
        """The environment of a process whose wall clock is wrong."""
        offset_s = next(self._clocks, 0)
        if not offset_s:
            return {}
        folder = self._folder / f"clock-{name}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(WRONG_CLOCK.format(offset_s=offset_s))
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}

    @property
    def members(self) -> Iterator[FleetMember]:
        yield from self.fronts
        yield from self.engines

    def member(self, name: str) -> FleetMember:
        return next(one for one in self.members if one.name == name)

    async def start(self) -> None:
        """Starts all engines side by side, and then all fronts."""
        await asyncio.gather(*(relay.start() for relay in self.relays.values()))
        self.fronts = [self._front(index) for index in range(self.size.num_fronts)]
        await asyncio.gather(*map(self.start_engine, range(self.size.num_engines)))
        await asyncio.gather(*(front.start() for front in self.fronts))

    async def start_engine(self, index: int) -> None:
        """Starts an engine, or its successor, and leads its links there."""
        await self.engines[index].start()
        self.lead_to(index)

    def lead_to(self, index: int) -> None:
        """New connections to an engine go to its present process."""
        host, _, port = self.engines[index].ready["listen"].rpartition(":")
        for relay in self.relays_of(engine=index):
            relay.target = (host, int(port))

    def relays_of(self, front: int | None = None, engine: int | None = None) -> list[Relay]:
        """The relays of a front, of an engine, or of both; None: of any."""
        return [relay for (at, to), relay in self.relays.items() if front in (None, at) and engine in (None, to)]

    async def stop(self) -> list[str]:
        """Ends all processes as an operator does. Returns what went wrong."""
        wrong = []
        for group in (self.fronts, self.engines):
            ends = await asyncio.gather(*(end(one, self.clock) for one in group))
            wrong += [one for one in ends if one is not None]
        wrong += [f"processes of {one.name} are left: {left}" for one in self.members if (left := one.left_over())]
        return wrong

    async def aclose(self) -> None:
        """Kills what is left. Idempotent."""
        for member in self.members:
            member.end_all()
        for relay in self.relays.values():
            with suppress(OSError):
                await relay.aclose()


async def end(member: FleetMember, clock: AwakeClock) -> str | None:
    """Sends SIGTERM to a process and waits for its end. Returns what was wrong with it, if anything was."""
    return None if member.process is None else await end_process(member, member.process, clock)


async def end_process(member: FleetMember, process: asyncio.subprocess.Process, clock: AwakeClock) -> str | None:
    """As `end`, of one of its processes.

    A process ends itself with an error when its stop takes too long. On a machine that stood still meanwhile that says
    nothing of it.
    """
    lost_s = clock.lost_s
    if process.returncode is None:
        process.terminate()
    if not await clock.wait([process.wait()], STOP_S):
        return f"{member.name} did not end {STOP_S:g} s after SIGTERM"
    code = process.returncode or 0
    is_late = code == KILLED_ITSELF and clock.lost_s - lost_s > STOOD_STILL_S
    if code and not is_late and not (code < 0 and process.pid in member.killed):
        return f"{member.name} ended with exit status {code} after SIGTERM"
    return None


WRONG_CLOCK = """# a wall clock that is wrong; the monotonic one is right
import time
_right, _right_ns = time.time, time.time_ns
time.time = lambda: _right() + {offset_s}
time.time_ns = lambda: _right_ns() + {offset_s} * 10**9
"""
