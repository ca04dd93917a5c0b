"""Operations of completions in token ids."""

from __future__ import annotations

from ..schema.operation import GENERATION_ERRORS, Operation, again, json_or_events
from . import shapes
from .body import GenerateBody

GENERATE = Operation(
    method="POST",
    path="/generate",
    name="generate",
    group="tokens",
    summary="Completion of token ids in token ids, whole or as a stream; also TGI's and SGLang's dialects",
    body=GenerateBody,
    answers=json_or_events(shapes.GeneratedTokens, shapes.GeneratedTokensChunk),
    errors=GENERATION_ERRORS,
)
OPERATIONS = again(GENERATE, inferenceGenerate="/inference/v1/generate")
