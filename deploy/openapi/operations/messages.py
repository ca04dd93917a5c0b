"""Operations of Anthropic's Messages API, with its own error format."""

from __future__ import annotations

from ...api.messages.bodies import CountTokensBody, MessagesBody
from ...api.messages.events import MESSAGES_PATH
from ..shapes import other_apis
from .operation import CHAT_ERRORS, GENERATION_ERRORS, Operation, json, json_or_named_events

MESSAGES = (
    Operation(
        method="POST",
        path=MESSAGES_PATH,
        name="createMessage",
        group="messages",
        summary="A message of Anthropic's API, whole or as a stream",
        body=MessagesBody,
        answers=json_or_named_events(other_apis.AnthropicMessage, other_apis.MessageEvent),
        error=other_apis.MessagesError,
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path=f"{MESSAGES_PATH}/count_tokens",
        name="countMessageTokens",
        group="messages",
        summary="Number of prompt tokens of a message",
        body=CountTokensBody,
        answers=json(other_apis.NumInputTokens),
        error=other_apis.MessagesError,
        errors=(*CHAT_ERRORS, "context_length_exceeded", "unsupported_parameter"),
    ),
)
