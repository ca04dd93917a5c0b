"""What processes of a fleet say of themselves: that fronts are linked, and at rest that nothing is left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .awake_clock import AwakeClock
from .fleet import ChaosFleet
from .members import FleetMember

if TYPE_CHECKING:
    import aiohttp

REST_S = 60.0  # until everything is free: links that count as lost, and what was computed for them
LOOK_S = 0.2
FREE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
SAMPLE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


async def wait_for_fronts(url: str, num_fronts: int, clock: AwakeClock, timeout_s: float) -> int:
    """Waits until so many fronts are linked to the engine whose pages are at `url`. Returns how many are."""
    import aiohttp

    deadline, found = clock.now() + timeout_s, 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        while found < num_fronts and clock.now() <= deadline:
            with suppress(OSError, TimeoutError, aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    found = int((await response.json())["fronts"])
            if found < num_fronts:
                await asyncio.sleep(LOOK_S)
    return found


async def check_rest(fleet: ChaosFleet, timeout_s: float = REST_S) -> list[str]:
    """I3 and I10 from outside: waits until all blocks are free and no process knows a request. What is not, else."""
    import aiohttp

    deadline = fleet.clock.now() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        while True:
            left = [one for group in await asyncio.gather(*_looks(session, fleet)) for one in group]
            if not left or fleet.clock.now() > deadline:
                return left
            await asyncio.sleep(LOOK_S)


def _looks(session: aiohttp.ClientSession, fleet: ChaosFleet) -> Sequence[asyncio.Future[list[str]]]:
    fronts = [asyncio.ensure_future(_left_in(session, one, str(one.ready["url"]), {})) for one in fleet.fronts]
    due = {"millrace:fronts": float(fleet.size.num_fronts), "millrace:engine_live_requests": 0.0}
    engines = [asyncio.ensure_future(_left_in(session, one, one.ready["metrics"], due)) for one in fleet.engines]
    return fronts + engines


async def _left_in(
    session: aiohttp.ClientSession, member: FleetMember, url: str, due: Mapping[str, float]
) -> list[str]:
    import aiohttp

    found: dict[str, float] = {}
    with suppress(OSError, TimeoutError, aiohttp.ClientError):
        async with session.get(f"{url}/metrics") as response:
            for name, value in SAMPLE.findall(await response.text()):
                found[name] = found.get(name, 0.0) + float(value)
    if not found:
        return [f"{member.name} does not answer at rest"]
    wanted = dict.fromkeys(FREE, 0.0) | dict(due)
    return [
        f"{member.name} at rest: {name} is {found.get(name)}, and must be {value:g}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
