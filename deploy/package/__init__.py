"""millrace: an LLM serving engine built as an asynchronous pipeline of seven stages.

`from millrace import LLM, Engine, SamplingParams` and the other public names of `millrace.stages` work here too, each
imported on first use. `python -m millrace` is the command line.

Owns: the import package `millrace` itself; the parts below it are the top-level folders (pyproject.toml).
In: nothing.
Out: the public names of `millrace.stages`, and `__version__`.
Imports: `stages`, by its full name: these files are `millrace`, not `millrace.deploy.package`.
Start with: `../../stages/__init__.py`.
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.stages import (
        LLM,
        Engine,
        EngineConfig,
        FleetEngine,
        LogitsProcessor,
        Pipeline,
        PlacedStage,
        PoolingParams,
        SamplingParams,
        Stage,
        StructuredOutputs,
        reply_text,
        stage,
    )

    __version__: str

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "FleetEngine",
    "LogitsProcessor",
    "Pipeline",
    "PlacedStage",
    "PoolingParams",
    "SamplingParams",
    "Stage",
    "StructuredOutputs",
    "__version__",
    "reply_text",
    "stage",
]

_HERE = os.path.dirname(os.path.abspath(__file__))
if _HERE.endswith(os.path.join("deploy", "package")):  # a checkout: the parts are the folders of its root
    __path__.append(os.path.dirname(os.path.dirname(_HERE)))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("millrace.deploy.http.package_version").package_version()
    if name in __all__:
        return getattr(import_module("millrace.stages"), name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
