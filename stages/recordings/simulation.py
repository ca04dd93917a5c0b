"""Simulation of other settings: the real intake, schedule and allocate in virtual time.

A cost model replaces the device and is the only thing that takes time, see `simulated_engine.py`.
"""

from __future__ import annotations

from ..schedule.policy import Policy
from .cost_model import CostModel
from .recorded_engine import RecordedEngine
from .simulated_engine import AdmissionLimits, SimulatedEngine
from .simulation_result import SimulationResult
from .workloads import Workload


class Simulation:
    """One run of a trace. `run` it once."""

    def __init__(
        self,
        engine: RecordedEngine,
        model: CostModel,
        admission: AdmissionLimits | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.engine = SimulatedEngine(engine, model, admission, policy)
        self.core = self.engine.core

    def run(self, trace: Workload) -> SimulationResult:
        """Serves every request of the trace, until the last has ended."""
        for number, request in enumerate(trace.requests):
            self.engine.expect(number, request)
        self.engine.advance()
        return self.engine.result()
