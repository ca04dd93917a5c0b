"""Models of embeddings, scores and ranks."""

from __future__ import annotations

from typing import Literal

from ..openai.shapes import Usage
from ..schema.shapes import Count, Shape


class Embedding(Shape):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str  # with encoding_format base64: text of little-endian float32


class Numbers(Shape):
    """The common fields of embeddings and scores."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    usage: Usage


class Embeddings(Numbers):
    """Embeddings, one per input, in input order."""

    data: list[Embedding]


class Score(Shape):
    """The score of one pair."""

    index: Count
    object: Literal["score"]
    score: float


class Scores(Numbers):
    """Scores, one per pair, in input order."""

    data: list[Score]


class RankedText(Shape):
    """The text of a document."""

    text: str


class Rank(Shape):
    """The relevance of one document; `index` is its position in the request."""

    index: Count
    relevance_score: float
    document: RankedText | None = None


class Ranks(Shape):
    """Documents in order of relevance, best first."""

    id: str
    model: str
    results: list[Rank]
    usage: Usage
