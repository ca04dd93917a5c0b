"""What clients get back: the shapes of chat and completions, whole and in chunks, with logprobs and usage.

Knows JSON. Refuses to know how a chunk is framed on its way, sockets and the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

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

    def add(self, delta: Delta, keep: bool) -> None:
        """Takes a piece in; its text and logprobs too if `keep`."""
        self.num_tokens += len(delta.token_ids)
        if keep:
            self.texts.append(delta.text)
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def usage(num_prompt: int, num_cached: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all prompts and all choices of a request."""
    num_completion = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Answer:
    """The shape of one request's answer. `head` is what its chunks have in common, encoded once."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, answer_id: str, created: int, model: str, has_usage: bool, has_running_usage: bool) -> None:
        self.id = answer_id
        self.has_usage = has_usage
        self.has_running_usage = has_running_usage
        self._common = {"id": answer_id, "created": created, "model": model}
        shared = {"id": answer_id, "object": self.CHUNK, "created": created, "model": model}
        self._head = orjson.dumps(shared)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if has_usage else b"]}"

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

    def chunk(self, choice: Choice, delta: Delta, running_usage: dict[str, Any] | None = None) -> bytes:
        """The chunk of one piece of one choice; empty if there is nothing to tell yet (half a character)."""
        if not (delta.text or delta.finish_reason or delta.logprobs or running_usage is not None):
            return b""
        return self._encoded(self._chunk_choice(choice, delta), running_usage)

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

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.texts)}
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


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Chat's shape: one entry a token, with its bytes, as a token may be half a character."""
    return {
        "content": [
            {
                **_token(token.token, token.token_bytes, token.logprob),
                "top_logprobs": [_token(text, raw, logprob) for _, text, raw, logprob in token.top],
            }
            for token in tokens
        ]
    }


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
