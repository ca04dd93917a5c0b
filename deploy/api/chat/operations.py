"""Operations of chat."""

from __future__ import annotations

from ..openai.shapes import RenderedPrompt
from ..schema.operation import ABORT, GENERATION_ERRORS, Operation, json, json_or_events
from . import shapes
from .body import ChatBody

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        group="generation",
        summary="The answer to a chat, whole or as a stream",
        body=ChatBody,
        answers=json_or_events(shapes.ChatCompletion, shapes.ChatCompletionChunk),
        errors=GENERATION_ERRORS,
        links=ABORT,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions/render",
        name="renderChatCompletion",
        group="tokens",
        summary="The body for /generate that is equivalent to a chat, without running the model",
        body=ChatBody,
        answers=json(RenderedPrompt),
        errors=GENERATION_ERRORS,
    ),
)
