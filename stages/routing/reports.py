"""What an engine tells a router: its load, and the keys of its cached blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.message import message
from ..allocate.allocator import Allocator
from ..schedule.scheduler import Scheduler
from .engine_load import EngineLoad
from .reported_load import load_of

KEY_BYTES = 16  # of a key that are told: two that begin alike cost a wrong choice, and no wrong answer


@message
class KeyChange:
    """Blocks whose keys a prefix cache has gained and lost since the last one."""

    added: NDArray[np.uint8]  # [N, 16] the first bytes of each key
    removed: NDArray[np.uint8]  # [M, 16]


class RouterReports:
    """Makes the reports of an engine. Make it before the engine gets its first request."""

    def __init__(self, scheduler: Scheduler, allocator: Allocator) -> None:
        self.num_seen = 0  # prompts that came from the router
        self._scheduler, self._allocator = scheduler, allocator
        self._last: tuple[object, ...] = ()
        scheduler.learn_costs()
        self._changes = None if allocator.cache is None else allocator.cache.watch_keys()

    def new(self) -> Iterator[EngineLoad | KeyChange]:
        """What has changed since the last call. No load before the costs of a prompt's tokens are known."""
        if self._changes is not None:
            delta = self._changes.take()
            if delta.added or delta.removed:
                yield KeyChange(packed(delta.added), packed(delta.removed))
        scheduler = self._scheduler
        assert scheduler.costs is not None
        moved = (self.num_seen, scheduler.completed_step, len(scheduler.sequences))
        if scheduler.costs.is_known and moved != self._last:
            self._last = moved
            costs, _ = scheduler.costs.read()
            yield load_of(scheduler, self._allocator, costs, self.num_seen)


def packed(keys: list[bytes]) -> NDArray[np.uint8]:
    """The first bytes of each key, [N, 16]."""
    told = b"".join(key[:KEY_BYTES] for key in keys)
    return np.frombuffer(told, np.uint8).reshape(-1, KEY_BYTES)


def unpacked(rows: Any) -> list[bytes]:
    """The first bytes of each key of a `KeyChange`. Raises ValueError for an array of another shape."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != KEY_BYTES:
        raise ValueError(f"keys of {rows.dtype}{rows.shape}: must be uint8[N, {KEY_BYTES}]")
    told = rows.tobytes()
    return [told[at : at + KEY_BYTES] for at in range(0, len(told), KEY_BYTES)]
