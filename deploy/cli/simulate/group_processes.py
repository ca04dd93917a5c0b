"""A group of simulated engines in a process of its own, so that several cores simulate a fleet."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ....stages.recordings.cost_model import CostModel
from ....stages.recordings.fleet.engine_group import EngineResult, EnginesHere, IntervalReport, Sent
from ....stages.recordings.recorded_engine import RecordedEngine
from ....stages.recordings.simulated_engine import AdmissionLimits


class EnginesInProcess:
    """As `EnginesHere`, in a child process, which ends with this one. Close it when it is not needed any more.

    What crosses is pickled by `multiprocessing`, between this process and the child that it started itself.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        engine: RecordedEngine,
        model: CostModel,
        admission: AdmissionLimits | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, numbers, engine, model, admission), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, sent: Sequence[Sent], until_s: float) -> None:
        self._pipe.send(("begin", sent, until_s))

    def finish(self) -> IntervalReport:
        report: IntervalReport = self._ask("finish")
        return report

    def kill(self, engine: int) -> Sequence[tuple[int, int]]:
        lost: Sequence[tuple[int, int]] = self._ask("kill", engine)
        return lost

    def results(self) -> Sequence[EngineResult]:
        results: Sequence[EngineResult] = self._ask("results")
        return results

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        self._process.kill()

    def _ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        answer, error = self._pipe.recv()
        if error is not None:
            raise error
        return answer


def _serve(
    pipe: Connection,
    numbers: Sequence[int],
    engine: RecordedEngine,
    model: CostModel,
    admission: AdmissionLimits | None,
) -> None:
    gc.disable()  # as in `simulate.run_one`
    group, failed = EnginesHere(numbers, engine, model, admission), None
    while True:
        try:
            name, *args = pipe.recv()
        except (EOFError, OSError):
            return
        if name == "begin":
            try:
                group.begin(*args)
            except Exception as error:
                failed = error
            continue
        try:
            pipe.send((None, failed) if failed is not None else (getattr(group, name)(*args), None))
        except Exception as error:
            pipe.send((None, error))
