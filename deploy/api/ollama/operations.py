"""Operations of Ollama's API, with its own error format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schema.operation import (
    ENGINE_ERRORS,
    GENERATION_ERRORS,
    MODEL_ERRORS,
    POOLING_ERRORS,
    Operation,
    json,
    json_or_lines,
)
from . import shapes
from .bodies import OllamaChatBody, OllamaGenerateBody
from .embeddings import OllamaEmbedBody, OllamaEmbeddingsBody
from .model_routes import CHANGES, OllamaPullBody, OllamaShowBody

COMMON: Mapping[str, Any] = {"group": "ollama", "error": shapes.OllamaError}
OPERATIONS = (
    Operation(
        method="POST",
        path="/api/chat",
        name="ollamaChat",
        summary="The answer to a chat, as a line for each piece unless stream is false",
        body=OllamaChatBody,
        answers=json_or_lines(shapes.OllamaChatAnswer, shapes.OllamaChatAnswer),
        errors=(*GENERATION_ERRORS, "unsupported_operation"),
        **COMMON,
    ),
    Operation(
        method="POST",
        path="/api/generate",
        name="ollamaGenerate",
        summary="The answer to a prompt, as a line for each piece unless stream is false",
        body=OllamaGenerateBody,
        answers=json_or_lines(shapes.OllamaAnswer, shapes.OllamaAnswer),
        errors=(*GENERATION_ERRORS, "unsupported_operation"),
        **COMMON,
    ),
    Operation(
        method="POST",
        path="/api/embed",
        name="ollamaEmbed",
        summary="Embedding vectors of texts, of length 1",
        body=OllamaEmbedBody,
        answers=json(shapes.OllamaVectors),
        errors=POOLING_ERRORS,
        **COMMON,
    ),
    Operation(
        method="POST",
        path="/api/embeddings",
        name="ollamaEmbeddings",
        summary="The embedding vector of one text",
        body=OllamaEmbeddingsBody,
        answers=json(shapes.OllamaVector),
        errors=POOLING_ERRORS,
        **COMMON,
    ),
    Operation(
        method="POST",
        path="/api/show",
        name="ollamaShow",
        summary="Details of a served name",
        body=OllamaShowBody,
        answers=json(shapes.OllamaModelDetails),
        errors=MODEL_ERRORS,
        **COMMON,
    ),
    Operation(
        method="POST",
        path="/api/pull",
        name="ollamaPull",
        summary="Success for a served name, which needs no download; 404 for any other",
        body=OllamaPullBody,
        answers=json_or_lines(shapes.OllamaStatus, shapes.OllamaStatus),
        errors=MODEL_ERRORS,
        **COMMON,
    ),
    Operation(
        method="GET",
        path="/api/tags",
        name="ollamaTags",
        summary="The served names",
        answers=json(shapes.OllamaModels),
        errors=ENGINE_ERRORS,
        **COMMON,
    ),
    Operation(
        method="GET",
        path="/api/ps",
        name="ollamaPs",
        summary="The served names, as models in memory",
        answers=json(shapes.OllamaModels),
        errors=ENGINE_ERRORS,
        **COMMON,
    ),
    Operation(
        method="GET",
        path="/api/version",
        name="ollamaVersion",
        summary="The version of Ollama's API that these routes follow, and that of millrace",
        answers=json(shapes.OllamaVersion),
        **COMMON,
    ),
    *(
        Operation(
            method="DELETE" if path.endswith("delete") else "POST",
            path=path,
            name=f"ollama{path.split('/')[2].title()}",
            summary=f"Refused with 403: {reason}",
            parameters={"digest": "Any"} if "{digest}" in path else {},
            answers={},
            errors=("unsupported_operation",),
            **COMMON,
        )
        for path, reason in CHANGES.items()
    ),
)
