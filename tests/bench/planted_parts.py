"""Parts that do what parts of a timed run may do, for tests. They import no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.bench.gpu.timed_run.parts import Part

Write = Callable[[str, Any], None]


def planted(name: str, group: str = "", limit_s: float = 20.0, **more: Any) -> Part:
    function = f"tests.bench.planted_parts:{name}"
    return Part(name, function, group or name, limit_s, more.pop("least_s", 0.1), "", has_place=False, **more)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def works(write: Write, job: object = None) -> None:
    write("row", {"name": "it", "us": 2.0, "floor_us": 1.0})


def out_of_memory(write: Write, job: object = None) -> None:
    works(write)
    raise OutOfMemoryError("tried to allocate 68 GiB")


def raises(write: Write, job: object = None) -> None:
    works(write)
    raise ArithmeticError("lost")


def hangs(write: Write, job: object = None) -> None:
    works(write)
    time.sleep(600)


def dies(write: Write, job: object = None) -> None:
    works(write)
    os._exit(7)


def writes_for_ever(write: Write, job: object = None) -> None:
    number = 0
    while True:
        write("row", {"name": "many", "number": (number := number + 1), "text": "x" * 3000})
