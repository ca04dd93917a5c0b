"""`/api/embed` and its older form `/api/embeddings`: their bodies and their handlers."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, ClassVar

import orjson
from aiohttp import web
from pydantic import Field, WithJsonSchema

from ....stages.engine.pooled_requests import pooled_request
from ....stages.messages import Request
from ....stages.pooling_params import MAX_INPUTS, PoolingParams
from ....stages.tasks import Task
from ...errors import ApiError
from ..embeddings.bodies import PooledBody
from ..embeddings.routes import EmbeddingRoutes, PooledAnswer
from ..openai.api_routes import post
from ..openai.prompts import read_prompts
from ..schema.hints import OF_ANY_LENGTH, Schema, array
from ..schema.unsupported import POOLING, Harmless
from .bodies import KeepAlive

TEXTS: Schema = {"anyOf": [OF_ANY_LENGTH, array(OF_ANY_LENGTH, MAX_INPUTS, least=1)]}
OPTIONS: Schema = {"type": ["object", "null"], "description": "without effect: no option changes an embedding"}


class OllamaEmbedBody(PooledBody):
    """`POST /api/embed`."""

    FOREIGN: ClassVar[Harmless] = POOLING
    NAMES: ClassVar[dict[str, str]] = {"prompt": "input"}

    input: Annotated[Any, WithJsonSchema(TEXTS)]
    truncate: Annotated[bool | None, WithJsonSchema({"enum": [True, None]})] = None  # a text that is too long is cut
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    options: Annotated[dict[str, Any] | None, WithJsonSchema(OPTIONS)] = None
    keep_alive: KeepAlive = None

    def check(self) -> None:
        super().check()
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ApiError("invalid_type", "input: must be a text, or a list of texts", param="input")
        if self.truncate is False:
            message = "truncate = False: a text that is too long is always cut; count its tokens with /tokenize first"
            raise ApiError("unsupported_parameter", message, param="truncate")

    def request(self, answer_id: str, tasks: frozenset[Task]) -> Request:
        """A request for one vector of length 1 per text. `ApiError` names the wrong field."""
        return _request(answer_id, self.input, "input", PoolingParams(dimensions=self.dimensions, normalize=True))


class OllamaEmbeddingsBody(PooledBody):
    """`POST /api/embeddings`: one text."""

    FOREIGN: ClassVar[Harmless] = {name: values for name, values in POOLING.items() if name != "prompt"}

    prompt: Annotated[str, WithJsonSchema(OF_ANY_LENGTH)]
    options: Annotated[dict[str, Any] | None, WithJsonSchema(OPTIONS)] = None
    keep_alive: KeepAlive = None

    def request(self, answer_id: str, tasks: frozenset[Task]) -> Request:
        """A request for the vector of the text."""
        return _request(answer_id, self.prompt, "prompt", PoolingParams())


class OllamaEmbeddings:
    """The handlers of both."""

    def __init__(self, embeddings: EmbeddingRoutes) -> None:
        self._embeddings = embeddings

    def table(self) -> list[web.RouteDef]:
        """The handler of each path."""
        return [post("/api/embed", self.embed), post("/api/embeddings", self.embeddings)]

    async def embed(self, request: web.Request) -> web.Response:
        """`POST /api/embed`."""
        write = partial(_embed, began_ns=time.perf_counter_ns())
        return await self._embeddings.answer(request, OllamaEmbedBody, "ollama-", write, takes_forms=True)

    async def embeddings(self, request: web.Request) -> web.Response:
        """`POST /api/embeddings`."""
        return await self._embeddings.answer(request, OllamaEmbeddingsBody, "ollama-", _one, takes_forms=True)


def _request(answer_id: str, texts: Any, name: str, pooling: PoolingParams) -> Request:
    return pooled_request(answer_id, read_prompts(texts, name, MAX_INPUTS), pooling, priority=0, cache_salt="")


def _embed(done: PooledAnswer[OllamaEmbedBody], began_ns: int) -> bytes:
    """Writes one vector per call of orjson, as one call for all would hold the GIL too long."""
    vectors = b",".join(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY) for vector in done.vectors)
    opening = orjson.dumps({"model": done.body.model or done.head["model"]})[:-1]
    closing = {
        "total_duration": time.perf_counter_ns() - began_ns,
        "load_duration": 0,
        "prompt_eval_count": done.outbox.num_prompt_tokens,
    }
    return b'%b,"embeddings":[%b],%b' % (opening, vectors, orjson.dumps(closing)[1:])


def _one(done: PooledAnswer[OllamaEmbeddingsBody]) -> bytes:
    return orjson.dumps({"embedding": done.vectors[0]}, option=orjson.OPT_SERIALIZE_NUMPY)
