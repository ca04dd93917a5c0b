"""Embeddings, scores and reranking: from a body to the engine and back.

None of them streams. However a handler ends, its request is closed.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import orjson
from aiohttp import web

from ....stages.engine.pooled_requests import check_scoring, read_vectors
from ....stages.pooling_params import Floats
from ...errors import describe
from ...http.body_reader import read
from ...http.request_context import OWNER, REQUEST_ID, checked_request_id
from ..openai.api_routes import ApiRoutes, post
from ..openai.choice_state import usage
from ..openai.prepared_request import ignored_headers
from .bodies import EmbeddingBody, PairsBody, PooledBody, RerankBody, ScoreBody

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.messages import Request
    from ....stages.outputs import ModelInfo
    from ..schema.operation import Operation

INLINE_NUMBERS = 16_384  # numbers written to JSON on the event loop; more would block it for over a millisecond

B = TypeVar("B", bound=PooledBody)


@dataclass(frozen=True, slots=True)
class PooledAnswer(Generic[B]):
    """A finished request, ready to be written as JSON."""

    body: B
    outbox: RequestOutbox
    vectors: Sequence[Floats]
    head: Mapping[str, Any]  # id and model
    info: ModelInfo


class EmbeddingRoutes(ApiRoutes):
    """The handlers of embeddings, scores and reranking."""

    def table(self) -> list[web.RouteDef]:
        return [
            post("/v1/embeddings", self.embeddings),
            *(post(path, self.score) for path in ("/score", "/v1/score")),
            *(post(path, self.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def embeddings(self, request: web.Request) -> web.Response:
        """`POST /v1/embeddings`."""
        return await self.answer(request, EmbeddingBody, "embd-", _embeddings)

    async def score(self, request: web.Request) -> web.Response:
        """`POST /score` and `/v1/score`."""
        return await self.answer(request, ScoreBody, "score-", _scores)

    async def rerank(self, request: web.Request) -> web.Response:
        """`POST /rerank`, `/v1/rerank` and `/v2/rerank`."""
        return await self.answer(request, RerankBody, "rerank-", _ranks)

    async def answer(
        self,
        request: web.Request,
        kind: type[B],
        prefix: str,
        write: Callable[[PooledAnswer[B]], bytes],
        takes_forms: bool = False,
    ) -> web.Response:
        """The answer to a body of this kind, as `write` makes it; for `takes_forms` see `body_reader.read`."""
        info = self.service.require_engine().info
        if issubclass(kind, PairsBody):
            check_scoring(info)

        def make(raw: Mapping[str, Any]) -> tuple[B, list[str], Request]:
            body, ignored = self.service.read_body(kind, raw)
            self.service.require_model(body.model)
            return body, ignored, body.request("", info.tasks)

        body, ignored, engine_request = await read(
            request, self.service.config, self._threads, make, takes_forms=takes_forms
        )
        if body.request_id is not None:
            request[REQUEST_ID] = checked_request_id(body.request_id)
        outbox, vectors = await self._compute(request, body, engine_request, prefix)
        head = {"id": outbox.request_id, "model": self.service.model_names[0]}
        done = PooledAnswer(body, outbox, vectors, head, info)
        if sum(map(len, done.vectors)) <= INLINE_NUMBERS:
            data = write(done)
        else:
            data = await asyncio.get_running_loop().run_in_executor(self._threads, write, done)
        return web.Response(body=data, content_type="application/json", headers=ignored_headers(ignored))

    async def _compute(
        self, request: web.Request, body: PooledBody, engine_request: Request, prefix: str
    ) -> tuple[RequestOutbox, Sequence[Floats]]:
        answer_id = self.service.open(prefix, request[REQUEST_ID], request[OWNER])
        cause = "disconnect"  # if no exception below sets another: the handler is cancelled when its client disconnects
        try:
            salt = self.service.cache_salt(engine_request.cache_salt, request[OWNER])
            engine_request = replace(engine_request, request_id=answer_id, cache_salt=salt, owner=request[OWNER])
            outbox = await self.service.require_engine().submit(engine_request, wait=True)
            return outbox, await read_vectors(outbox)
        except Exception as error:
            cause = "error"
            known = describe(error)
            raise (error if known is None else body.client_error(known)) from error
        finally:
            self.service.close(answer_id, cause)


def _embeddings(done: PooledAnswer[EmbeddingBody]) -> bytes:
    """Writes one embedding per call of orjson, as one call for all would hold the GIL too long."""
    in_base64 = done.body.encoding_format == "base64"
    items = []
    for index, vector in enumerate(done.vectors):
        embedding = _base64(vector) if in_base64 else vector
        item = {"object": "embedding", "index": index, "embedding": embedding}
        items.append(orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY))
    opening = orjson.dumps(_opening(done.head))[:-1]
    return b"%b,%b%b],%b%b}" % (opening, b'"data":[', b",".join(items), b'"usage":', orjson.dumps(_usage(done.outbox)))


def _scores(done: PooledAnswer[ScoreBody]) -> bytes:
    scores = done.body.pairs().scores(done.vectors, done.info.tasks, done.info.pooling)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return orjson.dumps(_opening(done.head) | {"data": data, "usage": _usage(done.outbox)})


def _ranks(done: PooledAnswer[RerankBody]) -> bytes:
    body = done.body
    scores = body.pairs().scores(done.vectors, done.info.tasks, done.info.pooling)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = []
    for index in best:
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        results.append({"index": index, "relevance_score": scores[index], **document})
    return orjson.dumps({**done.head, "results": results, "usage": _usage(done.outbox)})


def _base64(vector: Floats) -> str:
    """Base64 of little-endian float32, as OpenAI encodes it."""
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()


def _opening(head: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": head["id"], "object": "list", "created": int(time.time()), "model": head["model"]}


def _usage(outbox: RequestOutbox) -> dict[str, Any]:
    return usage(outbox.num_prompt_tokens, outbox.num_cached_tokens, ())
