"""Embeddings and scores: builds their requests, and turns vectors into results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...model.pooling import PoolingConfig
from ...model.sentence_files import Similarity
from ..errors import Refused
from ..exit.outboxes import RequestOutbox
from ..messages import Prompt, Request
from ..outputs import ModelInfo
from ..params import SamplingParams
from ..pooling_params import Floats, PoolingParams, no_instruction
from ..tasks import Task

NO_TOKENS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)  # for requests without text


def pooled_request(
    request_id: str, prompts: Sequence[Prompt], pooling: PoolingParams, *, priority: int = 0, cache_salt: str = ""
) -> Request:
    """A request for one vector per prompt."""
    return Request(request_id, tuple(prompts), NO_TOKENS, priority=priority, cache_salt=cache_salt, pooling=pooling)


async def read_vectors(outbox: RequestOutbox) -> list[Floats]:
    """Waits for the vectors of a pooled request, one per prompt, in order.

    Raises the `RequestError` that ended it, or `Refused` if it was cancelled.
    """
    vectors: list[Floats | None] = [None] * len(outbox.choices)
    async for deltas in outbox:
        for delta in deltas:
            vectors[delta.index] = delta.vector
            if delta.finish_reason == "abort":
                raise Refused("the request was cancelled before all of its inputs were done", code="cancelled")
    return [vector for vector in vectors if vector is not None]


def check_scoring(info: ModelInfo) -> None:
    """Raises `Refused` if scores of this model would mean nothing: it was not trained to embed or to rank texts."""
    if "generate" in info.tasks and "score" not in info.tasks and not info.has_trained_pooling:
        raise Refused(
            "this model generates text and ranks none: serve a cross-encoder or an embedding model for /score and "
            "/rerank, or start this one with --pooling last to compare its last hidden states, or with "
            "--pooling yes_no if it is a Qwen3-Reranker",
            code="unsupported_task",
            param="model",
        )


def as_texts(texts: str | Sequence[str]) -> Sequence[str]:
    """A list of texts, also from a single one."""
    return [texts] if isinstance(texts, str) else texts


@dataclass(frozen=True, slots=True)
class ScoringPairs:
    """Queries and documents to score: one query for all documents, or one each.

    A cross-encoder or another reranker scores each pair. With any other model the texts are embedded, each query once,
    and the score is the similarity of their embeddings: the cosine, unless the model names another.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    instruction: str | None = None  # for a reranker that reads one: what makes a document right; None: its own

    def __post_init__(self) -> None:
        if len(self.queries) not in (1, len(self.documents)):
            raise Refused(
                f"{len(self.queries)} queries and {len(self.documents)} documents: send one query for all documents, "
                "or as many of both",
                param="queries",
            )

    def request(
        self,
        request_id: str,
        tasks: Collection[Task],
        *,
        priority: int = 0,
        pooling: PoolingParams = PoolingParams(),  # noqa: B008 - immutable
    ) -> Request:
        """The request for a model with these `tasks`."""
        if "score" in tasks:
            pairs = zip(self._query_of_each(), self.documents, strict=True)
            prompts = [Prompt(pair=pair, instruction=self.instruction) for pair in pairs]
            return pooled_request(
                request_id, prompts, replace(pooling, kind="score", normalize=False), priority=priority
            )
        if self.instruction is not None:
            raise no_instruction()
        prompts = [Prompt(text=text, role="query") for text in self.queries]
        prompts += [Prompt(text=text, role="document") for text in self.documents]
        return pooled_request(request_id, prompts, pooling, priority=priority)

    def scores(
        self, vectors: Sequence[Floats], tasks: Collection[Task], pooling: PoolingConfig | None = None
    ) -> list[float]:
        """One score per document, from the vectors of the request to a model with this `pooling`."""
        if "score" in tasks:
            return [float(vector[0]) for vector in vectors]
        queries, documents = np.stack(vectors[: len(self.queries)]), np.stack(vectors[len(self.queries) :])
        scores = _SIMILARITIES["cosine" if pooling is None else pooling.similarity](queries, documents)
        return [float(score) for score in scores]

    def num_tokens(self, outbox: RequestOutbox, tasks: Collection[Task]) -> list[int]:
        """The number of tokens of each pair, both texts together."""
        counts = [len(choice.begun.token_ids) for choice in outbox.choices]
        if "score" in tasks:
            return counts
        queries, documents = counts[: len(self.queries)], counts[len(self.queries) :]
        queries = queries * (len(documents) // len(queries))
        return [query + document for query, document in zip(queries, documents, strict=True)]

    def cut(self, most: int) -> Iterator[ScoringPairs]:
        """Splits the pairs into parts of at most `most` documents."""
        for begin in range(0, len(self.documents), most):
            queries = self.queries if len(self.queries) == 1 else self.queries[begin : begin + most]
            yield ScoringPairs(queries, self.documents[begin : begin + most], self.instruction)

    def _query_of_each(self) -> list[str]:
        return [*self.queries] * (len(self.documents) // len(self.queries))


def _cosine(queries: Floats, documents: Floats) -> Floats:
    lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
    cosines: Floats = (queries * documents).sum(1) / np.maximum(lengths, 1e-12)
    return cosines


# Of embeddings [1 or N, E] and [N, E], as [N]: higher is more alike.
_SIMILARITIES: dict[Similarity, Callable[[Floats, Floats], Floats]] = {
    "cosine": _cosine,
    "dot": lambda queries, documents: (queries * documents).sum(1),
    "euclidean": lambda queries, documents: -np.linalg.norm(queries - documents, axis=1),
    "manhattan": lambda queries, documents: -np.abs(queries - documents).sum(1),
}
