"""Operations of pooling models: embeddings, scores and reranking."""

from __future__ import annotations

from ..schema.operation import POOLING_ERRORS, Operation, again, json
from . import shapes
from .bodies import EmbeddingBody, RerankBody, ScoreBody

SCORE = Operation(
    method="POST",
    path="/score",
    name="score",
    group="numbers",
    summary="Similarity of pairs of texts: one query with all documents, or query by document",
    body=ScoreBody,
    answers=json(shapes.Scores),
    errors=POOLING_ERRORS,
)
RERANK = Operation(
    method="POST",
    path="/rerank",
    name="rerank",
    group="numbers",
    summary="Documents in order of relevance to a query",
    body=RerankBody,
    answers=json(shapes.Ranks),
    errors=POOLING_ERRORS,
)
OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        name="createEmbeddings",
        group="numbers",
        summary="Embedding vectors of texts",
        body=EmbeddingBody,
        answers=json(shapes.Embeddings),
        errors=POOLING_ERRORS,
    ),
    SCORE,
    *again(SCORE, scoreV1="/v1/score"),
    RERANK,
    *again(RERANK, rerankV1="/v1/rerank", rerankV2="/v2/rerank"),
)
