"""What answers in numbers: embeddings, and how well texts go together."""

from __future__ import annotations

from ...api.openai.embedding_bodies import EmbeddingBody, RerankBody, ScoreBody
from ..shapes import other_apis as api_shapes
from .operation import POOLING_ERRORS, Operation, again, json

SCORE = Operation(
    method="POST",
    path="/score",
    name="score",
    group="numbers",
    summary="How well texts go together: one query with all documents, or one with one",
    body=ScoreBody,
    answers=json(api_shapes.Scores),
    errors=POOLING_ERRORS,
)
RERANK = Operation(
    method="POST",
    path="/rerank",
    name="rerank",
    group="numbers",
    summary="The documents that answer a query best, best first",
    body=RerankBody,
    answers=json(api_shapes.Ranks),
    errors=POOLING_ERRORS,
)
NUMBERS = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        name="createEmbeddings",
        group="numbers",
        summary="A vector for each text",
        body=EmbeddingBody,
        answers=json(api_shapes.Embeddings),
        errors=POOLING_ERRORS,
    ),
    SCORE,
    *again(SCORE, scoreV1="/v1/score"),
    RERANK,
    *again(RERANK, rerankV1="/v1/rerank", rerankV2="/v2/rerank"),
)
