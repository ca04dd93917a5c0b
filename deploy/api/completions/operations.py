"""Operations of completions."""

from __future__ import annotations

from ..openai.shapes import RenderedPrompts
from ..schema.operation import ABORT, GENERATION_ERRORS, Operation, json, json_or_events
from . import shapes
from .body import CompletionBody

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        group="generation",
        summary="Completions of one or several prompts, whole or as a stream",
        body=CompletionBody,
        answers=json_or_events(shapes.Completion, shapes.CompletionChunk),
        errors=GENERATION_ERRORS,
        links=ABORT,
    ),
    Operation(
        method="POST",
        path="/v1/completions/render",
        name="renderCompletion",
        group="tokens",
        summary="The bodies for /generate that are equivalent to the prompts, without running the model",
        body=CompletionBody,
        answers=json(RenderedPrompts),
        errors=GENERATION_ERRORS,
    ),
)
