"""The HTTP handlers of `/api/chat` and `/api/generate`, whole answers and streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from aiohttp import web

from ....stages.errors import RequestError
from ....stages.messages import Prompt
from ....stages.request_limits import chat_chars
from ...errors import ApiError
from ...http.body_reader import read
from ...http.request_context import OWNER, REQUEST_ID, session_of
from ...http.sized_threads import run_sized
from ...http.sse import stream_framed
from ..adapter.chat_adapter import AnswerParts, read_adapted, submit_chat, take_order
from ..completions.body import CompletionBody
from ..embeddings.routes import EmbeddingRoutes
from ..openai.api_routes import ApiParts, ApiRoutes, post
from ..openai.prepared_request import PreparedRequest, client_error, ignored_headers, stream_error
from ..openai.prompts import check_length
from .bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody
from .embeddings import OllamaEmbeddings
from .lines import AnswerLines, Line, closing_fields, framed, loaded, ollama_error
from .model_routes import OllamaModelRoutes
from .options import ignored_options

if TYPE_CHECKING:
    from ..schema.operation import Operation

PREFIX = "ollama-"
LINES_TYPE = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class PreparedOllama:
    """A validated request; `order` is None if it has nothing to answer."""

    body: OllamaBody
    order: PreparedRequest | None
    ignored: Sequence[str]  # names of unknown fields


class OllamaRoutes(ApiRoutes):
    """The handlers that generate. Their table has those of models and embeddings, too."""

    def __init__(self, parts: ApiParts) -> None:
        super().__init__(parts)
        self._models = OllamaModelRoutes(parts.service, parts.threads)
        self._embeddings = OllamaEmbeddings(EmbeddingRoutes(parts))

    def table(self) -> list[web.RouteDef]:
        return [
            post("/api/chat", self.chat),
            post("/api/generate", self.generate),
            *self._embeddings.table(),
            *self._models.table(),
        ]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /api/chat`."""
        return await self._answer(request, OllamaChatBody)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /api/generate`."""
        return await self._answer(request, OllamaGenerateBody)

    async def _answer(self, request: web.Request, kind: type[OllamaBody]) -> web.StreamResponse:
        began_ns = time.perf_counter_ns()
        self.service.require_engine()
        make = partial(self._read, kind)
        taken = await read(request, self.service.config, self._threads, make, takes_forms=True)
        body, is_chat, headers = taken.body, kind is OllamaChatBody, ignored_headers(taken.ignored)
        model = body.model or self.service.model_names[0]
        if taken.order is None:
            return web.Response(
                body=orjson.dumps(loaded(model, is_chat)), content_type="application/json", headers=headers
            )
        order = await self._fitted(body, taken.order)
        answer_id = self.service.open(PREFIX, request[REQUEST_ID], request[OWNER], session=session_of(request))
        lines = AnswerLines(model, is_chat)
        if not body.is_stream:
            async with submit_chat(self._generation, answer_id, order) as parts:
                async for more in parts:
                    lines.add(more, keeps=True)
            data = orjson.dumps(lines.whole(_closing(body, parts, began_ns)))
            return web.Response(body=data, content_type="application/json", headers=headers)
        return await stream_framed(
            request,
            self.service.config.stalled_reader_s,
            self._stream(answer_id, order, body, lines, began_ns),
            {"Content-Type": LINES_TYPE} | headers,
            on_stall=lambda: self.service.close(answer_id, "stalled_reader"),
        )

    async def _stream(
        self, answer_id: str, order: PreparedRequest, body: OllamaBody, lines: AnswerLines, began_ns: int
    ) -> AsyncGenerator[bytes, None]:
        async with submit_chat(self._generation, answer_id, order) as parts:
            first = await anext(parts)  # its error has a status of its own
            try:
                if made := lines.add(first):
                    yield framed(made)
                async for more in parts:
                    if made := lines.add(more):
                        yield framed(made)
                yield framed([lines.last(_closing(body, parts, began_ns))])
            except Exception as error:
                yield framed([ollama_error(stream_error(order, error, answer_id))])

    def _read(self, kind: type[OllamaBody], raw: Mapping[str, Any]) -> PreparedOllama:
        """Validates a body. `ApiError` names the wrong field. May be called in a thread."""
        info, strict_fields = self.service.require_engine().info, self.service.config.strict_fields
        body, _, ignored = read_adapted(kind, raw, strict_fields, self.service.ignored_fields.note)
        ignored += ignored_options(
            raw.get("options"), info.max_model_len, strict_fields, self.service.ignored_fields.note
        )
        if isinstance(body, OllamaGenerateBody) and body.context:
            least, most = min(body.context), max(body.context)
            if least < 0 or most >= info.vocab_size:
                message = (
                    "context: holds a token that this model does not have; send the `context` of an earlier answer"
                )
                raise ApiError("invalid_value", message, param="context")
        chat_format = self.service.require_chat_format()
        if body.think and not chat_format.has_thoughts:
            message = "think: this model does not mark its thoughts (see --reasoning-parser); leave think out"
            raise ApiError("unsupported_parameter", message, param="think")
        if isinstance(body, OllamaChatBody) and body.tools and not chat_format.has_auto_tools:
            message = (
                "tools: calls of this model are not read (see --tool-call-parser and --enable-auto-tool-choice); "
                "leave tools out"
            )
            raise ApiError("unsupported_parameter", message, param="tools")
        order = self._order(body, has_template=info.has_chat_template)
        return PreparedOllama(body, None if body.is_empty else order, [*ignored, *order.ignored])

    def _order(self, body: OllamaBody, has_template: bool) -> PreparedRequest:
        if isinstance(body, OllamaGenerateBody) and (body.raw or not (has_template or body.system)):
            completion = {name: value for name, value in body.completion().items() if value is not None}
            order = self._generation.order(CompletionBody, completion | {"model": body.model}, body.name_of)
            return replace(order, params=replace(order.params, max_tokens=body.longest))
        return take_order(self._generation, body.chat() | {"model": body.model}, body.name_of)

    async def _fitted(self, body: OllamaBody, order: PreparedRequest) -> PreparedRequest:
        """The order with the tokens of an earlier answer before its prompt, and no more tokens asked for than fit.

        Ollama ends an answer where the context does. The prompt is encoded here only if that is needed to know.
        """
        context = body.context if isinstance(body, OllamaGenerateBody) else None
        engine, prompt, longest = self.service.require_engine(), order.prompts[0], body.longest or 0
        num_chars = len(prompt.text or "") if prompt.chat is None else chat_chars(prompt.chat)
        most = engine.info.max_model_len
        num_turns = 1 if prompt.chat is None else len(prompt.chat.messages)
        if not context and (not longest or longest + 4 * num_chars + MARGIN * (1 + num_turns) <= most):
            return order
        check_length(num_chars, most, body.name_of("messages"))
        try:
            token_ids = await run_sized(self._threads, num_chars, _encode, engine.encoder, prompt)
        except RequestError as error:
            raise client_error(order, error) from None
        if context:
            bos = getattr(engine.tokenizer, "bos_token_id", None)
            token_ids = [*context, *(token_ids[1:] if token_ids[:1] == [bos] else token_ids)]
        params = replace(order.params, max_tokens=None) if len(token_ids) + longest > most else order.params
        return replace(order, params=params, prompts=(Prompt(token_ids=np.array(token_ids, np.int32)),))


MARGIN = 64  # tokens that a chat template may add to a message, and to the whole


def _encode(encoder: Any, prompt: Prompt) -> list[int]:
    if prompt.chat is not None:
        return list(encoder.encode_chat(prompt.chat))
    return list(encoder.encode_text(prompt.text))


def _closing(body: OllamaBody, parts: AnswerParts, began_ns: int) -> Line:
    assert parts.end is not None
    outbox, usage = parts.outbox, parts.usage
    fields = closing_fields(parts.end, outbox.metrics(), usage.num_prompt, usage.num_completion, began_ns)
    if isinstance(body, OllamaGenerateBody) and not body.raw:
        fields["context"] = [*outbox.prompt_token_ids(0).tolist(), *parts.token_ids]
    return fields
