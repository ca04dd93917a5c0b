"""The seven stages of an LLM engine, their messages, and the plain code behind them.

Owns: the contracts that every room of `stages` may import: messages, parameters, configuration, errors, outputs.
In: nothing; it holds no state.
Out: the messages that the rooms pass to each other.
Imports: `runtime`, `model`; no room, except for the lazy names below.
Start with: `pipeline.py`, then `messages.py`; then the room of the stage of interest.

The public names below are imported on first use, so that a program without a model starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..runtime.moved_modules import moved_modules

if TYPE_CHECKING:
    from ..runtime.pipeline import Pipeline
    from ..runtime.stage import Stage, stage
    from .config import EngineConfig
    from .engine.engine import Engine
    from .engine.llm import LLM
    from .engine.placed_stages import PlacedStage
    from .fleet.fleet_engine import FleetEngine
    from .params import SamplingParams
    from .pooling_params import PoolingParams
    from .replies import reply_text
    from .sample.logits_processor import LogitsProcessor
    from .structured_outputs import StructuredOutputs

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
    "reply_text",
    "stage",
]

_HOMES = {
    "LLM": ".engine.llm",
    "Engine": ".engine.engine",
    "EngineConfig": ".config",
    "FleetEngine": ".fleet.fleet_engine",
    "LogitsProcessor": ".sample.logits_processor",
    "Pipeline": "..runtime.pipeline",
    "PlacedStage": ".engine.placed_stages",
    "PoolingParams": ".pooling_params",
    "SamplingParams": ".params",
    "StructuredOutputs": ".structured_outputs",
    "reply_text": ".replies",
    "Stage": "..runtime.stage",
    "stage": "..runtime.stage",
}

moved_modules.add(
    __name__,
    {
        "conformance": "testing.conformance_kit",
        "policy": "schedule.policy",
        "processors": "sample.logits_processor",
        "pytest_plugin": "testing.pytest_plugin",
        "split.engine": "split.split_engine",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name], __name__), name)
