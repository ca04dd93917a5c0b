"""Planting of bugs: replaces a method of a real class for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pytest import MonkeyPatch

Bug = Callable[[], AbstractContextManager[None]]


@contextmanager
def changed(owner: object, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block, `owner.name` is `change` of the original."""
    with MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield
