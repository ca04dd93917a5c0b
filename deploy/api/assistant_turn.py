"""Parsing of one choice's text into content, reasoning and tool calls, whole or in pieces.

Streams and whole answers use the same code, so a joined stream equals the whole answer. The JSON around the pieces is
made in `openai/answers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from .parsers.interface import CallArguments, Event, Reasoning, ReasoningParser, Text, ToolParser


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """Call `index` of the turn begins. Its `ToolCallArguments` follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Piece: TypeAlias = Text | Reasoning | ToolCallBegun | ToolCallArguments


class AssistantTurn:
    """The output of one choice, parsed. `read` takes text and returns the new pieces.

    White space next to a call is dropped: model families write it there, and clients would show it. With
    `allows_parallel` False all calls but the first are dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        new_call_id: Callable[[], str] = ToolParser.new_call_id,
        allows_parallel: bool = True,
        shows_reasoning: bool = True,
        counter: ReasoningCounter | None = None,
    ) -> None:
        self.num_calls = 0
        self._reasoning = reasoning
        self._tools = tools
        self._new_call_id = new_call_id
        self._allows_parallel = allows_parallel
        self._shows_reasoning = shows_reasoning
        self._counter = counter
        self._blanks: list[str] = []  # held white space: content if text follows, dropped if a call follows
        self._is_dropped = False  # whether the current call is dropped
        self._arguments: list[str] = []  # of the current call
        self._has_broken_call = False

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens so far.

        None without a reasoning parser, or if its model family has no markers.
        """
        return None if self._counter is None else self._counter.num_tokens

    def finish_reason(self, reason: str) -> str:
        """The finish reason that the client gets, after the end.

        "tool_calls" says that there are calls to make. So an answer that ended inside of a call keeps its own reason.
        """
        return "tool_calls" if reason == "stop" and self.num_calls and not self._has_broken_call else reason

    def read(self, text: str, token_ids: Sequence[int], is_end: bool) -> list[Piece]:
        """Takes the next text and its tokens; returns the pieces that are certain by now."""
        if self._counter is not None:
            self._counter.add(token_ids)
        pieces: list[Piece] = []
        for event in self._find_calls(self._find_thoughts(text, is_end), is_end):
            piece = self._take(event)
            if piece is not None:
                pieces.append(piece)
        if is_end:
            self._end_call()
        if is_end and self._blanks and not self.num_calls:
            pieces.append(Text("".join(self._blanks)))
        return pieces

    def _find_thoughts(self, text: str, is_end: bool) -> list[Event]:
        if self._reasoning is None:
            return [Text(text)] if text else []
        return self._reasoning.feed(text) + (self._reasoning.finish() if is_end else [])

    def _find_calls(self, events: Iterable[Event], is_end: bool) -> list[Event]:
        if self._tools is None:
            return list(events)
        found: list[Event] = []
        for event in events:
            found.extend(self._tools.feed(event.text) if isinstance(event, Text) else [event])
        return found + (self._tools.finish() if is_end else [])

    def _take(self, event: Event) -> Piece | None:
        """The piece that the client gets for an event, if any."""
        if isinstance(event, Text):
            return event if self._tools is None else self._emit_text(event.text)
        if isinstance(event, Reasoning):
            return event if self._shows_reasoning else None
        if isinstance(event, CallArguments):
            return None if self._is_dropped else self._add_arguments(event.text)
        self._blanks.clear()
        self._end_call()
        self._is_dropped = self.num_calls > 0 and not self._allows_parallel
        if self._is_dropped:
            return None
        self.num_calls += 1
        return ToolCallBegun(self.num_calls - 1, self._new_call_id(), event.name)

    def _add_arguments(self, text: str) -> ToolCallArguments:
        self._arguments.append(text)
        return ToolCallArguments(self.num_calls - 1, text)

    def _end_call(self) -> None:
        """Notes whether the arguments of the current call, if there is one, are whole."""
        if self.num_calls and not self._is_dropped:
            self._has_broken_call |= not is_json_object("".join(self._arguments))
        self._arguments.clear()

    def _emit_text(self, text: str) -> Text | None:
        """Text up to its trailing white space, which is held until the next event."""
        stripped = text.rstrip()
        if not stripped:
            self._blanks.append(text)
            return None
        piece = Text("".join(self._blanks) + stripped if self._blanks else stripped)
        self._blanks = [text[len(stripped) :]] if len(stripped) < len(text) else []
        return piece


def is_json_object(text: str) -> bool:
    """Whether the arguments of a call are whole."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


class ReasoningCounter:
    """Counts reasoning tokens by their bytes, independent of where the text was cut.

    A token that holds only bytes of a marker does not count. As in `ThinkParser`, reasoning is open from the start, or
    the first non-blank text opens it.
    """

    def __init__(self, markers: tuple[str, str], is_open: bool, token_bytes: Callable[[int], bytes]) -> None:
        self.num_tokens = 0
        self._begin, self._end = (marker.encode() for marker in markers)
        self._token_bytes = token_bytes
        self._is_open = is_open
        self._has_begun = False
        self._is_over = False
        self._num_bytes = 0
        self._num_blank = 0  # tokens of white space before the first other text
        self._seen = b""  # all bytes until reasoning begins, then only what may belong to the closing marker
        self._spans: list[tuple[int, int]] = []  # [start, end) of the tokens in `_seen`, in bytes of the answer

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        for token_id in token_ids:
            if self._is_over:
                return
            raw = self._token_bytes(token_id)
            start, self._num_bytes = self._num_bytes, self._num_bytes + len(raw)
            self._seen += raw
            self._spans.append((start, self._num_bytes))
            if self._has_begun:
                self.num_tokens += 1
                self._find_end()
            else:
                self._find_beginning()

    def _find_beginning(self) -> None:
        stripped = self._seen.lstrip()
        if not stripped:
            self._num_blank += len(self._spans)
            self._seen = b""
            self._spans.clear()
            return
        is_marked = stripped.startswith(self._begin)
        if self._begin.startswith(stripped) and not is_marked:
            return  # a part of the marker
        self._has_begun = is_marked or self._is_open
        self._is_over = not self._has_begun
        start = len(self._seen) - len(stripped) + len(self._begin) if is_marked else 0
        offset = self._num_bytes - len(self._seen) + start
        self._seen = self._seen[start:]
        self._spans = [span for span in self._spans if span[1] > offset]
        if self._has_begun:
            self.num_tokens = len(self._spans) + (0 if is_marked else self._num_blank)
            self._find_end()

    def _find_end(self) -> None:
        at = self._seen.find(self._end)
        if at >= 0:
            end = self._num_bytes - len(self._seen) + at
            self.num_tokens -= sum(span[0] >= end for span in self._spans)
            self._is_over = True
            return
        self._seen = self._seen[1 - len(self._end) :]
        self._spans = [span for span in self._spans if span[1] > self._num_bytes - len(self._seen)]
