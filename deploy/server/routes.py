"""The routes: which path leads where, and the handlers that do not generate text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ...runtime.env.log import get_logger
from ...stages.messages import ChatPrompt
from ..api.messages.events import MESSAGES_PATH
from ..api.messages.routes import MessagesRoutes
from ..api.openai.embeddings import Embeddings
from ..api.openai.generation import Generation
from ..api.openai.tokenize_bodies import DetokenizeBody, TokenizeBody
from ..api.responses.routes import ResponsesRoutes
from ..api.responses.service import Responses
from ..api.schema.validation import read_body
from ..api.service import Service
from ..dashboard.feed import Feed
from ..errors import ApiError, shorten
from ..http.body_reader import read
from ..http.package_version import package_version
from ..http.request_context import OWNER
from ..http.responses import answer, expect
from ..inspect.server_info import load, server_info
from ..metrics.metrics import CONTENT_TYPE, Metrics
from ..websocket.hub import Hub
from .pages import Pages

log = get_logger("millrace.deploy")


class Routes:
    """The handlers of one server."""

    def __init__(self, service: Service, metrics: Metrics, threads: Executor) -> None:
        self.service = service
        self._metrics = metrics
        self._threads = threads
        self._generation = Generation(service, threads)
        self._pages = Pages()
        self._embeddings = Embeddings(service, threads)
        self._responses = Responses(self._generation, threads)
        self._messages = MessagesRoutes(self._generation, threads)
        self.sockets = Hub(self._generation, self._responses, metrics, threads)
        self.feed = Feed(service, metrics, threads, package_version())

    @property
    def public(self) -> frozenset[Any]:
        """Handlers that ask for no key."""
        pages = self._pages
        return frozenset({self.live, self.ready, pages.stream_demo, pages.dashboard, self.feed.socket, pages.file})

    def table(self) -> list[web.RouteDef]:
        """All routes."""
        generation, messages, embeddings = self._generation, self._messages, self._embeddings
        responses = ResponsesRoutes(self._responses, self._threads)
        return [
            web.get("/health", self.ready),
            web.get("/health/live", self.live),
            web.get("/health/ready", self.ready),
            web.get("/version", self.version),
            web.get("/server_info", self.server_info),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:(?s:.+)}", self.model),
            web.post("/v1/chat/completions", generation.chat, expect_handler=expect),
            web.post("/v1/completions", generation.completions, expect_handler=expect),
            web.post("/v1/embeddings", embeddings.embeddings, expect_handler=expect),
            *(web.post(path, embeddings.score, expect_handler=expect) for path in ("/score", "/v1/score")),
            *(
                web.post(path, embeddings.rerank, expect_handler=expect)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            web.post("/v1/responses", responses.create, expect_handler=expect),
            web.get("/v1/responses", self.sockets.responses, allow_head=False),
            web.get("/v1/responses/{id}", responses.retrieve),
            web.delete("/v1/responses/{id}", responses.delete),
            web.post("/v1/responses/{id}/cancel", responses.cancel),
            web.get("/v1/responses/{id}/input_items", responses.input_items),
            web.post(MESSAGES_PATH, messages.create, expect_handler=expect),
            web.post(f"{MESSAGES_PATH}/count_tokens", messages.count_tokens, expect_handler=expect),
            web.get("/v1/stream", self.sockets.stream, allow_head=False),
            web.get("/stream-demo", self._pages.stream_demo),
            web.get("/dashboard", self._pages.dashboard),
            web.get("/dashboard/feed", self.feed.socket, allow_head=False),
            web.get("/static/{name:(?s:.+)}", self._pages.file),
            web.post("/v1/chat/completions/render", generation.render_chat, expect_handler=expect),
            web.post("/v1/completions/render", generation.render_completions, expect_handler=expect),
            web.post("/generate", generation.generate, expect_handler=expect),
            web.post("/inference/v1/generate", generation.generate, expect_handler=expect),
            web.post("/tokenize", self.tokenize, expect_handler=expect),
            web.post("/detokenize", self.detokenize, expect_handler=expect),
            web.delete("/v1/requests/{id:(?!.+/explain$).+}", self.abort),  # what ends so is another route
        ]

    async def stop(self, app: web.Application) -> None:
        """Ends what no handler waits for."""
        await self._responses.stop()

    # -- health

    async def live(self, request: web.Request) -> web.Response:
        """The process answers."""
        return answer({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """A request would be taken; 503 says why not."""
        health = self.service.health
        if health.is_ready:
            return answer({"status": "ready"})
        return answer({"status": health.state, "stage": health.stage, "reason": health.reason}, status=503)

    async def version(self, request: web.Request) -> web.Response:
        """What runs here."""
        return answer({"version": package_version()})

    async def server_info(self, request: web.Request) -> web.Response:
        """The model, the settings, the memory table and how long the start took."""
        engine = self.service.require_engine()
        await engine.refresh()
        return answer(server_info(engine, self.service.config, self.service.model_names, package_version()))

    async def load(self, request: web.Request) -> web.Response:
        """How much is under way."""
        engine = self.service.require_engine()
        await engine.refresh()
        return answer(load(engine, len(self.service.live)))

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        if self.service.engine is not None:
            await self.service.engine.refresh()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    # -- models

    async def models(self, request: web.Request) -> web.Response:
        """All names that are served."""
        self.service.require_engine()
        return answer({"object": "list", "data": [self._model(name) for name in self.service.model_names]})

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        self.service.require_engine()
        name = request.match_info["id"]
        self.service.require_model(name)
        return answer(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        engine = self.service.require_engine()
        return {
            "id": name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "millrace",
            "root": self.service.model_names[0],
            "parent": None,
            "max_model_len": engine.info.max_model_len,
            "permission": [],
        }

    # -- tokens

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of a prompt or a chat."""
        engine = self.service.require_engine()
        body = await read(request, self.service.config, self._threads, self._tokenize_body)
        tokenizer, encoder = engine.tokenizer, engine.encoder
        if body.messages is not None:
            chat = ChatPrompt(
                messages=tuple(message.for_template() for message in body.messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs or {},
                tools=tuple(tool.for_template() for tool in body.tools or ()),
            )
            token_ids = await self._in_thread(encoder.encode_chat, chat)
        else:
            token_ids = await self._in_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        tokens = [int(token_id) for token_id in token_ids]
        if (most := body.truncate_prompt_tokens) is not None:
            tokens = tokens[-most:] if body.truncation_side == "left" else tokens[:most]
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokens]
        max_model_len = engine.info.max_model_len
        return answer({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids."""
        engine = self.service.require_engine()
        body = await read(request, self.service.config, self._threads, self._detokenize_body)
        vocab_size = engine.info.vocab_size
        if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= vocab_size):
            message = f"tokens holds an id outside 0..{vocab_size - 1}, the model's vocabulary"
            raise ApiError("invalid_value", message, param="tokens")
        return answer({"prompt": await self._in_thread(engine.tokenizer.decode, body.tokens, False)})

    def _tokenize_body(self, raw: Mapping[str, Any]) -> TokenizeBody:
        body, _ = read_body(TokenizeBody, raw, self.service.config.strict_fields)
        self.service.require_model(body.model)
        return body

    def _detokenize_body(self, raw: Mapping[str, Any]) -> DetokenizeBody:
        body, _ = read_body(DetokenizeBody, raw, self.service.config.strict_fields)
        self.service.require_model(body.model)
        return body

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        """What the tokenizer makes of that. `ApiError` 500 if it panics: code in Rust raises what is no `Exception`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("tokenizer.failed", error=type(error).__name__, exc_info=error)
            raise ApiError(
                "tokenizer_error", "the tokenizer failed on this request; it is not the client's fault"
            ) from None

    # -- requests under way

    async def abort(self, request: web.Request) -> web.Response:
        """Ends a request; its own client gets what there is, with finish_reason `abort`."""
        some_id = request.match_info["id"]
        if self.service.abort(some_id, request[OWNER]) is None:
            message = f"no request {shorten(repr(some_id), 128)} is under way"
            raise ApiError("request_not_found", message, param="id")
        return answer({"id": some_id, "aborted": True})
