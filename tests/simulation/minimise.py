"""The smallest part of a failing run that still fails: fewer clients, then fewer faults.

Delta debugging: halves of what is left are taken away while the run fails with the same error, then quarters, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.setups import Setup
from tests.simulation.world import run_seed

MAX_RUNS = 400


@dataclass(frozen=True)
class Part:
    """The clients, by their places in the set-up, and the faults that are left of a run."""

    clients: tuple[int, ...]
    faults: tuple[str, ...]

    @classmethod
    def whole(cls, setup: Setup) -> Part:
        return cls(tuple(range(len(setup.clients))), tuple(setup.faults))

    def of(self, setup: Setup) -> Setup:
        """The set-up with these clients and faults only."""
        clients = tuple(setup.clients[i] for i in self.clients)
        return replace(setup, clients=clients, faults={name: setup.faults[name] for name in self.faults})

    @property
    def flags(self) -> str:
        """The flags of `tests.simulation.run` that repeat it."""
        faults = " ".join(self.faults) or "none"
        return f"--clients {' '.join(map(str, self.clients))} --faults {faults}"


def minimise(setup: Setup, change: Callable[[Setup], Setup]) -> Part:
    """The smallest part that fails as the whole does, found in at most `MAX_RUNS` runs.

    Raises ValueError if the whole does not fail.
    """
    whole = Part.whole(setup)
    kind = failure(setup.seed, whole, change)
    if kind is None:
        raise ValueError(f"seed {setup.seed} does not fail")
    runs_left = MAX_RUNS

    def still_fails(part: Part) -> bool:
        nonlocal runs_left
        runs_left -= 1
        return runs_left >= 0 and failure(setup.seed, part, change) == kind

    clients = reduced(whole.clients, lambda left: still_fails(replace(whole, clients=tuple(left))))
    part = replace(whole, clients=tuple(clients))
    faults = reduced(part.faults, lambda left: still_fails(replace(part, faults=tuple(left))), least=0)
    return replace(part, faults=tuple(faults))


def failure(seed: int, part: Part, change: Callable[[Setup], Setup]) -> type[BaseException] | None:
    """The kind of error in which a part of a run ends."""
    try:
        run_seed(seed, change=lambda setup: part.of(change(setup)))
    except Exception as error:
        return type(error)
    return None


def reduced(items: Sequence[Any], fails: Callable[[Sequence[Any]], bool], least: int = 1) -> Sequence[Any]:
    """A part of `items` that `fails`, of which no single item can be left out."""
    size = max(1, len(items) // 2)
    while len(items) > least:
        for begin in range(0, len(items), size):
            left = [*items[:begin], *items[begin + size :]]
            if len(left) >= least and fails(left):
                items = left
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(items) // 2))
    return items
