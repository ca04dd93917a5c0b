"""How long each phase of the start took."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Phases:
    """Seconds that each phase of the start took.

    Called as a context manager with the phase's name.
    """

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        began = self.clock()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + self.clock() - began, 4)
