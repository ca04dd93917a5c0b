"""Parsers of reasoning and tool calls in an answer's text, one per model family.

Owns: the parsers and their registry.
In: text in pieces of any size.
Out: events.
Imports: the root of `stages`, for `ConfigError`.
Start with: `interface.py`, which defines what a parser of your own must do.
"""

from __future__ import annotations

from .interface import CallArguments, CallBegun, Event, Reasoning, ReasoningParser, Text, ToolParser
from .reasoning import ThinkParser

__all__ = [
    "CallArguments",
    "CallBegun",
    "Event",
    "Reasoning",
    "ReasoningParser",
    "Text",
    "ThinkParser",
    "ToolParser",
]
