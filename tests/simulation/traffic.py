"""Runs of a front whose engines have labels, in virtual time: a split and a shadow, which change while requests run.

As `machines.py`, with the same draws, strikes and checks. Of two engines the second has the label, and of three or four
the third serves copies at times. Besides:

    I21  at rest no copy is in flight, and each that was sent has one result; no engine of a shadow ever had a client's
         request
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from millrace.runtime.simulation.run import SimResult
from millrace.stages.messages import TokenRequest
from millrace.stages.split.inflight_requests import FIRST_COPY_ID
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.simulation.fleet import _note, run_fleet_seed
from tests.simulation.machines import MachinesWorld
from tests.simulation.world import Report, _require

VERSIONS = ("v1", "v2", "v3", "v1")  # by engine


class TrafficWorld(MachinesWorld):
    """See `FleetWorld`."""

    def __init__(self, drawn: Any, env: Any) -> None:
        super().__init__(drawn, env)
        self._dice = Random(f"traffic/{drawn.setup.seed}")
        self.num_copies = 0
        self.rules = self._drawn_rules()

    def labels_of(self, index: int) -> dict[str, str]:
        return {"version": VERSIONS[index]}

    def _drawn_rules(self) -> TrafficRules:
        split = self._dice.choice((None, "version=v2:0", "version=v2:50", "version=v2:100", "version=v3:30"))
        has_shadow = self.setup.config.data_parallel_size > 2 and split != "version=v3:30"
        shadow = self._dice.choice((None, "version=v3:30", "version=v3:100")) if has_shadow else None
        return TrafficRules.parse(split, shadow)

    async def _live(self, engine: Any) -> Report:
        self._watch_sends(engine)
        changing = asyncio.create_task(self._change(engine), name="rules")
        try:
            report = await super()._live(engine)
        finally:
            changing.cancel()
            await asyncio.wait([changing])
        copies = engine.traffic.copies
        _require(not len(copies), f"I21: {len(copies)} copies are in flight")
        _require(not (copies._ours or copies._copied or copies._of_client), "I21: something of a copy is left")
        _require(not len(engine.traffic.counts), "I21: the split still counts requests")
        report.states["copies"] += self.num_copies
        report.states["moved"] += sum(side.num_moved for side in engine.traffic.counts.sides.values())
        return report

    async def _change(self, engine: Any) -> None:
        for _ in range(self._dice.randrange(4)):
            await self.env.sleep(self._dice.choice((self._dice.uniform(0.0, 0.1), self._dice.uniform(0.0, 5.0))))
            self.rules = self._drawn_rules()
            engine.traffic.change(self.rules)

    def _watch_sends(self, engine: Any) -> None:
        """Notes what goes to each engine."""
        for core in engine.core.processes.cores:
            send = core.requests.try_send

            def sent(prompt: TokenRequest, send: Any = send, index: int = core.index) -> bool:
                is_copy = prompt.first_sequence_id >= FIRST_COPY_ID
                is_shadow = not engine.traffic.rules.serves_clients(self.labels_of(index))
                _note(self, is_copy == is_shadow, f"I21: {prompt.request_id} went to engine {index}")
                is_sent: bool = send(prompt)
                self.num_copies += is_copy and is_sent
                return is_sent

            core.requests.try_send = sent


def run_traffic_seed(seed: int, *, keep_trace: bool = False) -> SimResult[Report]:
    """As `run_machines_seed`, with labels and what goes by them."""
    return run_fleet_seed(seed, keep_trace=keep_trace, make_world=TrafficWorld, flags=" --traffic")
