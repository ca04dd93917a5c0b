"""The JSON of the answer to a chat, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from ..assistant_turn import Piece, ToolCallArguments, ToolCallBegun
from ..openai.answers import AnswerBuilder, choice_fields
from ..openai.choice_state import ChoiceState
from ..openai.logprob_fields import chat_logprobs, spelled_as
from ..parsers.interface import Reasoning, Text

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta


class ChatAnswerBuilder(AnswerBuilder):
    """`chat.completion` and `chat.completion.chunk`."""

    PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = super().whole(choices, usage)
        for part in self.prompts.values():  # chat has one prompt
            if part.prompt_logprobs is not None:
                body["prompt_logprobs"] = part.prompt_logprobs
            if part.token_ids is not None:
                body["prompt_token_ids"] = part.token_ids
        return body

    def opening(self, num_choices: int) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._encoded(choice_fields(index, {"delta": delta}, None, None, None)) for index in range(num_choices)
        ]
        if self.prompts and self.prompts[0].token_ids is not None:
            ids = b'"prompt_token_ids":' + orjson.dumps(self.prompts[0].token_ids) + b","
            chunks[0] = chunks[0].replace(b'"choices":[', ids + b'"choices":[', 1)
        return chunks

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        """One chunk per piece of the turn, as clients join pieces of the same kind."""
        if choice.turn is None:
            return super().chunks(choice, delta, running_usage)
        deltas = [_piece_delta(piece) for piece in choice.pieces]
        has_unread = deltas or delta.finish_reason or delta.logprobs or (self.has_token_ids and delta.token_ids)
        if not has_unread and running_usage is None:
            return []
        chunk_choices = [choice_fields(choice.index, {"delta": part}, None, None, None) for part in deltas or [{}]]
        chunk_choices[0]["logprobs"] = self._logprobs(choice, delta.logprobs)
        if self.has_token_ids:
            chunk_choices[0]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            chunk_choices[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return [self._encoded(chunk_choice, running_usage) for chunk_choice in chunk_choices]

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        if choice.turn is None:
            message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.texts)}
        else:
            message = _message(choice.pieces)
        logprobs = self._kept_logprobs(choice)
        whole = choice_fields(choice.index, {"message": message}, logprobs, choice.finish_reason, choice.stop_reason)
        return whole | {"token_ids": choice.token_ids} if self.has_token_ids else whole

    def logprob_lists(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return self._detailed(chat_logprobs(spelled_as(tokens, self.has_tokens_as_ids)), tokens)

    def _logprobs(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self.logprob_lists(choice, tokens) if tokens else None

    def _chunk_choice(self, choice: ChoiceState, delta: ChoiceDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        logprobs = self._logprobs(choice, delta.logprobs)
        return choice_fields(choice.index, {"delta": content}, logprobs, delta.finish_reason, delta.stop_reason)


def _piece_delta(piece: Piece) -> dict[str, Any]:
    """The `delta` of a chunk for a piece."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if isinstance(piece, ToolCallBegun):
        return {"tool_calls": [{"index": piece.index, **_call(piece, "")}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All pieces as one message. `content` is null if there are calls or reasoning but no text."""
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
