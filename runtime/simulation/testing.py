"""Test tools for asynchronous code: run a test under many seeds, and report the failing one.

`millrace.stages.testing` builds on this; this file does not depend on stages.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from .run import POLICIES, SimEnv, SimResult, SimSettings, run


class LeakedTasks(AssertionError):
    """Tasks outlived the code that should have ended them (invariant I7)."""


def sim_test(
    *,
    seeds: int | Iterable[int] = 10,
    policies: Collection[str] = POLICIES,
    **settings: Unpack[SimSettings],
) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[..., None]]:
    """Makes a test of `async def test(env, ...)`.

    It runs once per seed, in virtual time, and must leave no task.

    Seed i runs under policy i modulo the number of policies. The first seed that fails ends the test. The failure says
    how to repeat the run: MILLRACE_SIM_SEED=7 MILLRACE_SIM_POLICY=pct in the environment. Parameters other than `env`
    are pytest's (fixtures, parametrize), shared by all seeds. `seeds` is a number of seeds, or the seeds.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., None]:
        signature = inspect.signature(test)
        if "env" not in signature.parameters:
            raise TypeError(f"{test.__qualname__}: a sim_test takes a parameter named env, the SimEnv of the run")

        @functools.wraps(test)
        def run_all(*args: Any, **kwargs: Any) -> None:
            for seed, policy in _runs(seeds, policies):
                with _says_how_to_repeat(seed, policy):
                    result = run(lambda env: test(*args, env=env, **kwargs), seed=seed, policy=policy, **settings)
                    check_no_leaked_tasks(result)

        others = [parameter for name, parameter in signature.parameters.items() if name != "env"]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate


def check_no_leaked_tasks(result: SimResult[Any]) -> None:
    """Raises `LeakedTasks` if tasks outlived the run's main coroutine."""
    if result.leaked_tasks:
        raise LeakedTasks(f"{len(result.leaked_tasks)} tasks outlived the test:\n" + "\n".join(result.leaked_tasks))


@contextmanager
def no_leaked_tasks() -> Iterator[None]:
    """On a live loop: raises `LeakedTasks` if the block leaves tasks that it started."""
    before = asyncio.all_tasks()
    yield
    leaked = sorted(repr(task) for task in asyncio.all_tasks() - before)
    if leaked:
        raise LeakedTasks(f"{len(leaked)} tasks outlived the block:\n" + "\n".join(leaked))


def _runs(seeds: int | Iterable[int], policies: Collection[str]) -> Iterator[tuple[int, str]]:
    chosen = list(policies)
    only_seed, only_policy = os.environ.get("MILLRACE_SIM_SEED"), os.environ.get("MILLRACE_SIM_POLICY")
    if only_seed:
        seeds = [int(only_seed)]
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        yield seed, only_policy or chosen[seed % len(chosen)]


@contextmanager
def _says_how_to_repeat(seed: int, policy: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"again: MILLRACE_SIM_SEED={seed} MILLRACE_SIM_POLICY={policy} pytest ...")
        raise


__all__ = ["LeakedTasks", "SimEnv", "check_no_leaked_tasks", "no_leaked_tasks", "sim_test"]
