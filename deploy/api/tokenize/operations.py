"""Operations of texts and their token ids."""

from __future__ import annotations

from ..schema.operation import CHAT_ERRORS, MODEL_ERRORS, Operation, json
from . import shapes
from .bodies import DetokenizeBody, TokenizeBody

OPERATIONS = (
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        group="tokens",
        summary="Token ids of a prompt or a chat",
        body=TokenizeBody,
        answers=json(shapes.Tokens),
        errors=CHAT_ERRORS,
        links={"text": {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}},
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        group="tokens",
        summary="The text of token ids",
        body=DetokenizeBody,
        answers=json(shapes.DetokenizedText),
        errors=(*MODEL_ERRORS, "tokenizer_error"),
    ),
)
