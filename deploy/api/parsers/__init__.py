"""What an answer's text means: thoughts, words, calls of tools. One parser a family of models, and the place for yours.

Parsers are pure: text in, events out, no I/O. `interface.py` says what one is; start reading there.
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
