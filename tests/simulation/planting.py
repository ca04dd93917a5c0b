"""How a bug is planted: a method of a real class is another one for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pytest import MonkeyPatch

Bug = Callable[[], AbstractContextManager[None]]


@contextmanager
def changed(owner: object, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """While it lasts, `owner.name` is what `change` makes of it."""
    with MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield
