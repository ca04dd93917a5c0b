"""Test tools for stages and servers: an engine without a model, and the conformance kit.

Owns: nothing.
In: a script of answers, or a custom stage.
Out: an engine that answers without a model; `BrokenPromise` for a stage that breaks the contract of stages.
Imports: `runtime`, the root of `stages`, `scripted`; may import all of `stages`.
Start with: `scripted/engine.py` and `conformance_kit.py`; import from this package.

    from millrace.stages.testing import conformance, scripted_engine

    async with scripted_engine(answer="Hello!") as engine:
        async for output in engine.generate("anything"):
            ...

No torch. Names imported from here are loaded on first use: the kit imports the simulated event loop, which an engine
alone does not need. For a pytest fixture see `pytest_plugin.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance_kit import BrokenPromise, conformance
    from .scripted.engine import (
        SMALL,
        ScriptedEngine,
        ScriptedPipeline,
        check_parts,
        check_quiet,
        scripted_engine,
        scripted_pipeline,
    )
    from .scripted.script import Script

__all__ = [
    "SMALL",
    "BrokenPromise",
    "Script",
    "ScriptedEngine",
    "ScriptedPipeline",
    "check_parts",
    "check_quiet",
    "conformance",
    "scripted_engine",
    "scripted_pipeline",
]

_HOMES = {"BrokenPromise": ".conformance_kit", "conformance": ".conformance_kit", "Script": ".scripted.script"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES.get(name, ".scripted.engine"), __name__), name)
