"""What clients get back: the shapes of chat and completions, whole and in chunks, with logprobs and usage.

Knows JSON. Refuses to know how a chunk is framed on its way, sockets and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from .parsers.interface import Reasoning, Text
from .turns import Piece, ToolCallArguments, ToolCallBegun, Turn

if TYPE_CHECKING:
    from ..stages.messages import TokenLogprobs
    from ..stages.outputs import Delta

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(slots=True)
class Choice:
    """One answer as it grows. `num_chars` counts the text of its tokens, for `text_offset`."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    num_chars: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    turn: Turn | None = None  # what the text means, if more may be in it than words
    pieces: list[Piece] = field(default_factory=list)  # of the turn: all that are kept, or those of the last delta

    def add(self, delta: Delta, keep: bool) -> None:
        """Takes a piece in; its text and logprobs too if `keep`."""
        self.num_tokens += len(delta.token_ids)
        if self.turn is not None:
            pieces = self.turn.read(delta.text, delta.token_ids, delta.finish_reason is not None)
            if not keep:
                self.pieces.clear()
            self.pieces += pieces
        if keep:
            self.texts.append(delta.text)
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if self.turn is not None and self.turn.num_calls and delta.finish_reason == "stop":
                self.finish_reason = "tool_calls"


def usage(num_prompt: int, num_cached: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all prompts and all choices of a request."""
    num_completion = sum(choice.num_tokens for choice in choices)
    told: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    thoughts = [choice.turn.num_reasoning_tokens for choice in choices if choice.turn is not None]
    if any(count is not None for count in thoughts):
        told["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in thoughts)}
    return told


class Answer:
    """The shape of one request's answer. `head` is what its chunks have in common, encoded once."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        has_usage: bool,
        has_running_usage: bool,
        make_turn: Callable[[], Turn] | None = None,
    ) -> None:
        """`make_turn` for answers in which more than words may be."""
        self.id = answer_id
        self._make_turn = make_turn
        self.has_usage = has_usage
        self.has_running_usage = has_running_usage
        self._common = {"id": answer_id, "created": created, "model": model}
        shared = {"id": answer_id, "object": self.CHUNK, "created": created, "model": model}
        self._head = orjson.dumps(shared)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if has_usage else b"]}"

    def choices(self, num_choices: int) -> list[Choice]:
        """So many, with nothing in them yet."""
        make_turn = self._make_turn
        return [Choice(index, turn=None if make_turn is None else make_turn()) for index in range(num_choices)]

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            "id": self.id,
            "object": self.WHOLE,
            "created": self._common["created"],
            "model": self._common["model"],
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": usage,
            "system_fingerprint": None,
        }

    def opening(self, num_choices: int) -> list[bytes]:
        """The chunks before any text."""
        return []

    def chunks(self, choice: Choice, delta: Delta, running_usage: dict[str, Any] | None = None) -> list[bytes]:
        """The chunks of one piece of one choice; none if there is nothing to tell yet (half a character)."""
        if not (delta.text or delta.finish_reason or delta.logprobs or running_usage is not None):
            return []
        return [self._encoded(self._chunk_choice(choice, delta), running_usage)]

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The extra chunk at the end of a stream that was asked for usage."""
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}"

    def _encoded(self, choice: dict[str, Any], running_usage: dict[str, Any] | None = None) -> bytes:
        if running_usage is not None:
            return self._head + orjson.dumps(choice) + b'],"usage":' + orjson.dumps(running_usage) + b"}"
        return self._head + orjson.dumps(choice) + self._tail

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """`chat.completion` and `chat.completion.chunk`."""

    PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def opening(self, num_choices: int) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        return [self._encoded(_ending(index, {"delta": delta}, None, None, None)) for index in range(num_choices)]

    def chunks(self, choice: Choice, delta: Delta, running_usage: dict[str, Any] | None = None) -> list[bytes]:
        """One chunk for each thing that the turn tells, as clients join what is of one kind."""
        if choice.turn is None:
            return super().chunks(choice, delta, running_usage)
        told = [_told(piece) for piece in choice.pieces]
        if not (told or delta.finish_reason or delta.logprobs or running_usage is not None):
            return []
        endings = [_ending(choice.index, {"delta": part}, None, None, None) for part in told or [{}]]
        if delta.logprobs:
            endings[0]["logprobs"] = chat_logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            endings[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return [self._encoded(ending, running_usage) for ending in endings]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        if choice.turn is None:
            message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.texts)}
        else:
            message = _message(choice.pieces)
        logprobs = chat_logprobs(choice.logprobs) if choice.logprobs else None
        return _ending(choice.index, {"message": message}, logprobs, choice.finish_reason, choice.stop_reason)

    def _chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        return _ending(choice.index, {"delta": content}, logprobs, delta.finish_reason, delta.stop_reason)


class CompletionAnswer(Answer):
    """`text_completion`, whole and in chunks."""

    PREFIX = "cmpl-"
    WHOLE = "text_completion"
    CHUNK = "text_completion"

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = completion_logprobs(choice, choice.logprobs) if choice.logprobs else None
        text = {"text": "".join(choice.texts)}
        return _ending(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)

    def _chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = completion_logprobs(choice, delta.logprobs) if delta.logprobs else None
        return _ending(choice.index, {"text": delta.text}, logprobs, delta.finish_reason, delta.stop_reason)


def _told(piece: Piece) -> dict[str, Any]:
    """A piece as the `delta` of a chunk."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if isinstance(piece, ToolCallBegun):
        return {"tool_calls": [{"index": piece.index, **_call(piece, "")}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All pieces as one message. Content is null where there is something else and no content."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    begun = [piece for piece in pieces if isinstance(piece, ToolCallBegun)]
    arguments: list[list[str]] = [[] for _ in begun]
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            arguments[piece.index].append(piece.text)
    calls = [_call(call, "".join(texts)) for call, texts in zip(begun, arguments, strict=True)]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or thoughts else "")}
    if thoughts:
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if calls:
        message["tool_calls"] = calls
    return message


def _call(begun: ToolCallBegun, arguments: str) -> dict[str, Any]:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Chat's shape: one entry a token."""
    return {"content": token_logprobs(tokens)}


def token_logprobs(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One entry a token, with its bytes, as a token may be half a character."""
    return [
        {
            **_token(token.token, token.token_bytes, token.logprob),
            "top_logprobs": [_token(text, raw, logprob) for _, text, raw, logprob in token.top],
        }
        for token in tokens
    ]


def completion_logprobs(choice: Choice, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Completions' shape: parallel lists. Offsets go on where the choice's last ones ended."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        chosen = {token.token: _finite(token.logprob)}
        shape["tokens"].append(token.token)
        shape["token_logprobs"].append(_finite(token.logprob))
        shape["top_logprobs"].append({text: _finite(logprob) for _, text, _, logprob in token.top} | chosen)
        shape["text_offset"].append(choice.num_chars)
        choice.num_chars += len(token.token)
    return shape


def _ending(
    index: int, text: dict[str, Any], logprobs: Any, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        **text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
