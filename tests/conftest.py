"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from millrace.kernels.native import build, machine
from millrace.runtime.env import log
from tests.counts import FULL
from tests.native_builds import quicken
from tests.thinned import dropped

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several beside each other: torch's threads would fight for the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not FULL:
    quicken(build.FLAGS, machine.instruction_sets())

settings.register_profile(  # a machine that stands still for half a minute draws no slower than another
    "millrace",
    deadline=None,
    derandomize=not FULL,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("millrace")


def pytest_configure(config: pytest.Config) -> None:
    """Full counts have no time limit per test."""
    if FULL:
        config.option.timeout = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In CI some cases of functions with very many are left out."""
    # a case that is asked for by name runs
    gone = [] if FULL or any("::" in argument for argument in config.args) else dropped(items)
    if gone:
        config.hook.pytest_deselected(items=gone)
        names = {item.nodeid for item in gone}
        items[:] = [item for item in items if item.nodeid not in names]


def pytest_collection_finish() -> None:
    """What all tests have imported stays: no collection of garbage looks at it again, which takes half a second."""
    gc.freeze()


class Imported:
    """How many modules the process had when the collector last put its objects aside."""

    num_modules = 0


class Collected:
    """Whether a whole collection has taken long since then: models that tests keep are many objects too."""

    was_slow = False
    began_s = 0.0

    @classmethod
    def note(cls, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            cls.began_s = time.perf_counter()
        elif info["generation"] == 2:
            cls.was_slow |= time.perf_counter() - cls.began_s > SLOW_S


SLOW_S = 0.05
gc.callbacks.append(Collected.note)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a test has imported stays as well. An engine collects garbage when it stops, which would take half a second
    in a process that has seen transformers' models; hundreds of tests stop one or more."""
    result = yield
    if len(sys.modules) > Imported.num_modules + 20 or Collected.was_slow:
        gc.collect()
        gc.freeze()
        Imported.num_modules, Collected.was_slow = len(sys.modules), False
    return result


@pytest.fixture(autouse=True)
def draws_begin_anew() -> None:
    """What a test draws does not depend on the tests its process ran before."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def the_log_is_put_back() -> Iterator[None]:
    """A command run within this process sets up the log, and would leave it so for the tests after it."""
    yield
    log.shutdown()
