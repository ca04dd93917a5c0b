"""The HTTP handlers of `/generate`, whose body says whose dialect it is, of `/generate_stream` and `/info`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ....stages.params import MAX_STOPS
from ...errors import ApiError
from ...http.body_reader import read
from ...http.package_version import package_version
from ...http.request_context import ERROR_BODY
from ...http.responses import answer
from ..adapter.chat_adapter import renamed
from ..completions.body import CompletionBody
from ..openai.answers import AnswerBuilder
from ..openai.api_routes import ApiRoutes, post
from ..openai.prepared_request import PreparedRequest
from ..token_ids.body import GenerateBody, TokenIdsAnswerBuilder
from . import sglang, tgi
from .sglang import SglangAnswerBuilder, SglangBody
from .tgi import TgiAnswerBuilder, TgiBody, TgiParameters

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ..schema.operation import Operation

DIALECTS = "token_ids (vLLM), inputs (TGI), or text or input_ids (SGLang)"


@dataclass(frozen=True, slots=True)
class PreparedDialect:
    """A validated request, and what writes its answer."""

    order: PreparedRequest
    shape: type[AnswerBuilder]
    make_answer: Callable[[str, RequestOutbox], AnswerBuilder] | None = None  # None: as vLLM answers


class DialectRoutes(ApiRoutes):
    """The handlers."""

    def table(self) -> list[web.RouteDef]:
        return [
            post("/generate", self.generate),
            post(tgi.TGI_STREAM_PATH, self.generate_stream),
            web.get("/info", self.info),
        ]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate`, in the dialect of the body."""
        return await self._answer(request, partial(self._read, request))

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate_stream`: TGI's stream."""
        request[ERROR_BODY] = tgi.tgi_error
        return await self._answer(request, partial(self._read_tgi, is_stream=True))

    async def info(self, request: web.Request) -> web.Response:
        """`GET /info`: the model and the limits, as TGI tells them."""
        info = self.service.require_engine().info
        return answer(
            {
                "model_id": self.service.model_names[0],
                "model_sha": None,
                "model_dtype": f"torch.{info.dtype}",
                "model_device_type": info.device.partition(":")[0],
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": self.service.require_engine().config.max_num_seqs,
                "max_best_of": 1,
                "max_stop_sequences": MAX_STOPS,
                "max_input_tokens": info.max_model_len - 1,
                "max_total_tokens": info.max_model_len,
                "router": "millrace",
                "version": package_version(),
            }
        )

    async def _answer(
        self, request: web.Request, make: Callable[[Mapping[str, Any]], PreparedDialect]
    ) -> web.StreamResponse:
        self.service.require_engine()
        taken = await read(request, self.service.config, self._threads, make)
        return await self._generation.respond(request, taken.order, taken.shape, taken.make_answer)

    def _read(self, request: web.Request, raw: Mapping[str, Any]) -> PreparedDialect:
        """Validates a body in its own dialect. May be called in a thread."""
        if "inputs" in raw and "token_ids" not in raw:
            request[ERROR_BODY] = tgi.tgi_error
            return self._read_tgi(raw, is_stream=raw.get("stream") is True)
        if ("text" in raw or "input_ids" in raw) and "token_ids" not in raw:
            request[ERROR_BODY] = sglang.sglang_error
            return self._read_sglang(raw)
        if "token_ids" not in raw:
            message = f"token_ids: send one of {DIALECTS}; a prompt as text goes to /v1/completions too"
            raise ApiError("missing_required_parameter", message, param="token_ids")
        return PreparedDialect(self._generation.order(GenerateBody, raw), TokenIdsAnswerBuilder)

    def _read_tgi(self, raw: Mapping[str, Any], is_stream: bool) -> PreparedDialect:
        body, ignored = self.service.read_body(TgiBody, raw)
        if raw.get("parameters"):
            try:
                ignored += [
                    f"parameters.{name}" for name in self.service.read_body(TgiParameters, raw["parameters"])[1]
                ]
            except ApiError as error:
                raise error.named(lambda name: f"parameters.{name}") from None
        order = self._order(body.completion(is_stream), ignored, lambda name: renamed(name, tgi.NAMES))
        if body.parameters is None or body.parameters.max_new_tokens is None:
            order = replace(order, params=replace(order.params, max_tokens=None))
        special_ids: frozenset[int] = frozenset(self.service.require_engine().tokenizer.special_ids)

        def make_answer(answer_id: str, outbox: RequestOutbox) -> AnswerBuilder:
            return TgiAnswerBuilder(answer_id, body, outbox, special_ids)

        return PreparedDialect(order, TgiAnswerBuilder, make_answer)

    def _read_sglang(self, raw: Mapping[str, Any]) -> PreparedDialect:
        body, ignored = self.service.read_body(SglangBody, raw)
        completion, unknown = body.completion()
        if unknown and self.service.config.strict_fields:
            raise ApiError("unknown_parameter", f"{unknown[0]}: unknown field; leave it out", param=unknown[0])
        names = sglang.NAMES | {"prompt": body.prompt_field}
        order = self._order(completion, [*ignored, *unknown], lambda name: renamed(name, names))
        if not body.has_length:
            order = replace(order, params=replace(order.params, max_tokens=self._default_length(order)))
        num_prompts = len(order.prompts)

        def make_answer(answer_id: str, outbox: RequestOutbox) -> AnswerBuilder:
            return SglangAnswerBuilder(answer_id, body, outbox, num_prompts)

        return PreparedDialect(order, SglangAnswerBuilder, make_answer)

    def _default_length(self, order: PreparedRequest) -> int | None:
        """SGLang's default; None, which is what the context leaves, if that may be less."""
        prompts = order.prompts
        longest = max(len(p.token_ids) if p.token_ids is not None else 4 * len(p.text or "") for p in prompts)
        fits = longest + sglang.DEFAULT_MAX_NEW_TOKENS < self.service.require_engine().info.max_model_len
        return sglang.DEFAULT_MAX_NEW_TOKENS if fits else None

    def _order(
        self, completion: Mapping[str, Any], ignored: list[str], name_of: Callable[[str], str]
    ) -> PreparedRequest:
        order = self._generation.order(CompletionBody, completion, name_of)
        return replace(order, ignored=[*ignored, *order.ignored])
