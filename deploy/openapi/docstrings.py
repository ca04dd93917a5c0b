"""Descriptions of models where Python runs without docstrings (`python -OO`): read from the source files.

So the document is the same in every mode. Models that an installation without sources lacks stay without description.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

from pydantic import BaseModel

PACKAGE = __name__.partition(".")[0]


def add_descriptions(schemas: dict[str, dict[str, Any]]) -> None:
    """Adds the docstring of each model as the description of its schema, in place, unless docstrings are loaded."""
    if sys.flags.optimize < 2:
        return
    for model in _models(BaseModel):
        schema = schemas.get(model.__name__)
        if schema is not None and "description" not in schema:
            text = _docstrings(sys.modules[model.__module__]).get(model.__name__)
            if text:
                schema["description"] = text


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        if model.__module__.startswith(PACKAGE):
            yield model
        yield from _models(model)


@cache
def _docstrings(module: ModuleType) -> dict[str, str | None]:
    """The docstrings of a module's classes, as `inspect.cleandoc` gives them."""
    try:
        source = inspect.getsource(module)
    except OSError:
        return {}
    return {node.name: ast.get_docstring(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
