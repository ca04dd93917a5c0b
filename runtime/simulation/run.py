"""Runs a coroutine on a loop with virtual time and a seeded order of callbacks.

A seed determines the run, callback by callback, in every process. A run ends with the value of its main coroutine or
with an error: `Deadlock` as soon as nothing can happen any more, `Livelock` when callbacks never end, `LoopErrors` for
errors that were never handled.

Differences from a live loop: time stands still while anything is ready, so code that polls never ends. Callbacks that
are ready together run in any order, also those of successive `call_soon`s. "Threads" run on the loop's thread. The
cyclic garbage collector is off during a run, as finalizers at odd moments would make runs differ.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

from anyio._backends._asyncio import CancelScope

from .env import SimEnv, SimSettings
from .loop import MAX_CALLBACKS, START_S, Deadlock, Livelock, LoopErrors, SimError, SimLoop
from .policies import POLICIES

__all__ = [
    "MAX_CALLBACKS",
    "POLICIES",
    "Deadlock",
    "Livelock",
    "LoopErrors",
    "SimEnv",
    "SimError",
    "SimLoop",
    "SimResult",
    "SimSettings",
    "run",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimResult(Generic[T]):
    value: T
    trace_hash: str  # SHA-256 over (virtual time, what ran) of each callback, and the notes
    num_callbacks: int
    virtual_s: float  # from the start to the end of the main coroutine
    leaked_tasks: tuple[str, ...]  # where each task that outlived the main coroutine waited, in order of creation
    faults_seen: Counter[str]  # how often each fault point was passed
    faults_fired: Counter[str]
    trace: tuple[str, ...]  # the hashed events, with `keep_trace`


def run(
    main: Callable[[SimEnv], Coroutine[Any, Any, T]],
    *,
    seed: int,
    policy: str = "uniform",
    **settings: Unpack[SimSettings],
) -> SimResult[T]:
    """Runs `main(env)` to its end in virtual time.

    Tasks that outlive it are cancelled and reported.

    An exception of `main` is raised with a note that has the seed and policy. See `SimEnv` for the settings.
    """
    env = SimEnv(seed, policy=policy, **settings)
    loop = env.loop
    try:
        with _no_garbage_collection(), _numbered_cancel_scopes():
            try:
                value = loop.run_until_complete(loop.create_task(main(env), name="main"))
                virtual_s = loop.time() - START_S
                leaked = loop.unwind()
            except BaseException as error:
                error.add_note(f"simulation: seed={seed} policy={policy!r} at callback {loop.num_callbacks}")
                for message in loop.errors:
                    error.add_note(f"also: {message}")
                loop.abandon()
                raise
        loop.check_errors()
    finally:
        loop.close()
    return SimResult(
        value, loop.trace_hash(), loop.num_callbacks, virtual_s, leaked, env.faults.seen, env.faults.fired, loop.trace
    )


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _numbered_cancel_scopes() -> Generator[None]:
    """anyio cancels nested scopes in the order of a set, hence of addresses.

    Here scopes hash to numbers in the order of their first hashing, which is the same in every process.
    """
    numbers: dict[int, tuple[int, object]] = {}  # by id, with the scope, so that no id is reused

    def number(scope: object) -> int:
        return numbers.setdefault(id(scope), (len(numbers), scope))[0]

    before = CancelScope.__hash__
    CancelScope.__hash__ = number  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CancelScope.__hash__ = before  # type: ignore[method-assign]
