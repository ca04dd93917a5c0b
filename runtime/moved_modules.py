"""Old module names: importing one raises an `ImportError` that names the module's new place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


class MovedModules:
    """A finder in `sys.meta_path`.

    NOTE: it comes first, since a folder that holds only old bytecode counts as a package for the finders behind it.
    It is no `MetaPathFinder`, as `importlib.abc` takes 8 ms to import.
    """

    def __init__(self) -> None:
        self._new_names: dict[str, str] = {}

    def add(self, package: str, new_names: Mapping[str, str]) -> None:
        """`new_names`: old name to new name, both without the package."""
        self._new_names |= {f"{package}.{old}": f"{package}.{new}" for old, new in new_names.items()}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """None for every name but an old one."""
        if new_name := self._new_names.get(fullname):
            raise ImportError(f"{fullname} has moved: import {new_name}", name=fullname)


moved_modules = MovedModules()
