"""The seven stages of an LLM engine, the messages between them, and the plain code they wrap.

Start reading at `pipeline.py`. What people import from here is loaded on first use, so that a slice without a model
starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.pipeline import Pipeline
    from ..runtime.stage import Stage, stage
    from .config import EngineConfig
    from .engine import Engine
    from .grammar.structured import StructuredOutputs
    from .offline import LLM
    from .params import SamplingParams
    from .pooling import PoolingParams
    from .processors import LogitsProcessor

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "LogitsProcessor",
    "Pipeline",
    "PoolingParams",
    "SamplingParams",
    "Stage",
    "StructuredOutputs",
    "stage",
]

_HOMES = {
    "LLM": ".offline",
    "Engine": ".engine",
    "EngineConfig": ".config",
    "LogitsProcessor": ".processors",
    "Pipeline": "..runtime.pipeline",
    "PoolingParams": ".pooling",
    "SamplingParams": ".params",
    "StructuredOutputs": ".grammar.structured",
    "Stage": "..runtime.stage",
    "stage": "..runtime.stage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name], __name__), name)
