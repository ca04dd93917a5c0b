"""Which steps are void, when the device thread and the completion thread note failed steps at the same time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.stages.backends.cuda.async_device import AsyncDevice
from millrace.stages.device.device import StepSkipped
from tests.stages.grants import grant

ROWS = [(0, 0, 1, True)]


class Failing:
    """A step that was submitted, and fails on the device."""

    def exception(self) -> None:
        return None

    def result(self) -> Failing:
        return self

    def wait(self) -> None:
        raise MemoryError("the device failed")


class SlowNumber(int):
    """A generation: while it is compared, the other thread notes that a later one is void."""

    other: threading.Thread

    def __gt__(self, value: int) -> bool:
        if self.other.ident is None:
            self.other.start()
            self.other.join(5.0)
        return int(self) > value


def test_a_failure_noted_by_the_other_thread_meanwhile_is_not_lost() -> None:
    device = AsyncDevice(SimpleNamespace(enter=None, probe=None))  # type: ignore[arg-type]
    device._now_ns = lambda: 0  # of an env that it has not joined
    submitted: Any = Failing()
    failures: list[BaseException] = []

    def fail(_: object) -> None:
        raise MemoryError

    def finish_later_step() -> None:
        try:
            device._finish(grant(ROWS, step=2, generation=9), submitted)
        except MemoryError as error:
            failures.append(error)

    generation = SlowNumber(5)
    generation.other = threading.Thread(target=finish_later_step)
    with pytest.raises(MemoryError):
        device._run_forward(grant(ROWS, step=1, generation=generation), fail)
    assert not generation.other.is_alive() and len(failures) == 1
    for skipped in (5, 9):
        with pytest.raises(StepSkipped, match="generation 9"):
            device._run_forward(grant(ROWS, step=3, generation=skipped), lambda _: "logits")
    assert device._run_forward(grant(ROWS, step=4, generation=10), lambda _: "logits") == "logits"
