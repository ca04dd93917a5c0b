"""How long each phase of the start took, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .load_progress import LoadProgress


@dataclass(slots=True)
class Phases:
    """Seconds that each phase of the start took, and the progress of loading.

    Called as a context manager with the phase's name.
    """

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)
    progress: LoadProgress = None  # type: ignore[assignment]  # made by the clock where none is given

    def __post_init__(self) -> None:
        self.progress = self.progress or LoadProgress(self.clock)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        began = self.clock()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + self.clock() - began, 4)
