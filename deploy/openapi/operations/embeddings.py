"""Operations of pooling models: embeddings, scores and reranking."""

from __future__ import annotations

from ...api.openai.embedding_bodies import EmbeddingBody, RerankBody, ScoreBody
from ..shapes import other_apis
from .operation import POOLING_ERRORS, Operation, again, json

SCORE = Operation(
    method="POST",
    path="/score",
    name="score",
    group="numbers",
    summary="Similarity of pairs of texts: one query with all documents, or query by document",
    body=ScoreBody,
    answers=json(other_apis.Scores),
    errors=POOLING_ERRORS,
)
RERANK = Operation(
    method="POST",
    path="/rerank",
    name="rerank",
    group="numbers",
    summary="Documents in order of relevance to a query",
    body=RerankBody,
    answers=json(other_apis.Ranks),
    errors=POOLING_ERRORS,
)
NUMBERS = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        name="createEmbeddings",
        group="numbers",
        summary="Embedding vectors of texts",
        body=EmbeddingBody,
        answers=json(other_apis.Embeddings),
        errors=POOLING_ERRORS,
    ),
    SCORE,
    *again(SCORE, scoreV1="/v1/score"),
    RERANK,
    *again(RERANK, rerankV1="/v1/rerank", rerankV2="/v2/rerank"),
)
