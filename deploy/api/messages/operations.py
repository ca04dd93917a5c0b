"""Operations of Anthropic's Messages API, with its own error format."""

from __future__ import annotations

from ..schema.operation import CHAT_ERRORS, GENERATION_ERRORS, Operation, json, json_or_named_events
from . import shapes
from .bodies import CountTokensBody, MessagesBody
from .events import MESSAGES_PATH

OPERATIONS = (
    Operation(
        method="POST",
        path=MESSAGES_PATH,
        name="createMessage",
        group="messages",
        summary="A message of Anthropic's API, whole or as a stream",
        body=MessagesBody,
        answers=json_or_named_events(shapes.AnthropicMessage, shapes.MessageEvent),
        error=shapes.MessagesError,
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path=f"{MESSAGES_PATH}/count_tokens",
        name="countMessageTokens",
        group="messages",
        summary="Number of prompt tokens of a message",
        body=CountTokensBody,
        answers=json(shapes.NumInputTokens),
        error=shapes.MessagesError,
        errors=(*CHAT_ERRORS, "context_length_exceeded", "unsupported_parameter"),
    ),
)
