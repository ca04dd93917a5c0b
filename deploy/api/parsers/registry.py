"""The known parsers, by name or import path, and the choice of one from a chat template."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from ....stages.errors import ConfigError
from .hermes import HermesParser
from .interface import ReasoningParser, ToolParser
from .llama3_json import Llama3JsonParser
from .mistral import MistralParser
from .pythonic import PythonicParser
from .reasoning import DeepSeekR1Parser, ThinkParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {"deepseek_r1": DeepSeekR1Parser, "qwen3": ThinkParser}

# text in a template -> the call format of its model; the most specific text first
TOOL_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)

P = TypeVar("P", ToolParser, ReasoningParser)


def tool_parser(setting: str, template: str) -> type[ToolParser] | None:
    """The parser that `--tool-call-parser` names; None for "none".

    "auto" selects the parser of the template's family, or hermes if the template shows none. Raises `ConfigError` for
    an unknown name.
    """
    if setting == "auto":
        setting = next((name for sign, name in TOOL_SIGNS if sign in template), "hermes")
    return _find(setting, "tool_call_parser", TOOL_PARSERS, ToolParser)


def reasoning_parser(setting: str, template: str) -> type[ReasoningParser] | None:
    """The parser that `--reasoning-parser` names; None for "none".

    "auto" selects one if the template has `</think>`, else none. Raises `ConfigError` for an unknown name.
    """
    if setting == "auto":
        setting = "none" if "</think>" not in template else "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
    return _find(setting, "reasoning_parser", REASONING_PARSERS, ReasoningParser)


def _find(name: str, setting: str, known: dict[str, type[P]], kind: type[P]) -> type[P] | None:
    if name == "none":
        return None
    return known[name] if name in known else _load(name, setting, known, kind)


def _load(name: str, setting: str, known: dict[str, type[P]], kind: type[P]) -> type[P]:
    where, _, class_name = name.partition(":")
    if not where or not class_name:
        raise ConfigError(f"{setting} = {name!r}: must be auto, none, {', '.join(known)} or package.module:Class")
    try:
        found: Any = getattr(importlib.import_module(where), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting} = {name!r}: cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{setting} = {name!r}: must be a subclass of millrace.deploy.api.parsers.{kind.__name__}")
    return found
