"""From a body that generates to the engine and back, whole or as a stream, for the routes of all APIs.

However a handler ends, its request is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from ....runtime.env.log import get_logger
from ....stages.messages import Prompt, Request
from ...errors import ApiError, wrong_field
from ...http.body_reader import read
from ...http.request_context import ATTEMPTED, OWNER, REQUEST_ID, checked_request_id, session_of
from ..schema.metadata import metadata_pairs
from ..schema.processors import FIELD, NOT_IN_BEAMS, asked_processors
from ..service import Service
from .answers import AnswerBuilder
from .choice_state import best, usage
from .chunks import ChunkIterator, PromptEchoer
from .generation_body import GenerationBody
from .prepared_request import PreparedRequest, client_error, ignored_headers, listed_names, time_limit_s
from .prompt_echo import echo_prompt
from .rendered_bodies import rendered
from .streamed_answer import stream_answer

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox

log = get_logger("millrace.deploy")


class Generation:
    """Takes, submits and answers requests for text or token ids. One per server; the routes of all APIs share it."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self.threads = threads

    async def render(
        self, request: web.Request, kind: type[GenerationBody], shape: type[AnswerBuilder]
    ) -> web.Response:
        """Answers with bodies for `/generate`, without computing: one for a chat, a list for completions."""
        order = await self._take(request, kind)
        engine, answer_id = self.service.require_engine(), shape.PREFIX + request[REQUEST_ID]
        try:
            prompts, params = await engine.render(Request(answer_id, order.prompts, order.params))
        except Exception as error:
            raise client_error(order, error) from error
        raw = order.body.model_dump(include={"stream", "priority", "cache_salt"})
        loop, model = asyncio.get_running_loop(), self.service.answered_model(order.body.model)
        texts = [await loop.run_in_executor(self.threads, engine.decode, ids.tolist(), False) for ids in prompts]
        prompt_bodies = [
            rendered(answer_id, model, ids, text, params, raw) for ids, text in zip(prompts, texts, strict=True)
        ]
        body = orjson.dumps(prompt_bodies if order.body.chat is None else prompt_bodies[0])
        return web.Response(body=body, content_type="application/json", headers=ignored_headers(order.ignored))

    async def generate(
        self, request: web.Request, kind: type[GenerationBody], shape: type[AnswerBuilder]
    ) -> web.StreamResponse:
        """Reads a body of that kind and answers it in that shape, whole or as a stream."""
        return await self.respond(request, await self._take(request, kind), shape)

    async def respond(
        self,
        request: web.Request,
        order: PreparedRequest,
        shape: type[AnswerBuilder],
        make_answer: Callable[[str, RequestOutbox], AnswerBuilder] | None = None,
    ) -> web.StreamResponse:
        """Answers an order in that shape, made by `make_answer` if that needs more than other shapes."""
        if order.body.request_id is not None:
            request[REQUEST_ID] = checked_request_id(order.body.request_id)
        answer_id = self.service.open(shape.PREFIX, request[REQUEST_ID], request[OWNER], session=session_of(request))
        cause = "disconnect"  # if no exception below sets another: the handler is cancelled when its client disconnects
        try:
            outbox = request[ATTEMPTED] = await self.submit(answer_id, order, time_limit_s(request, order.body))
            if make_answer is None:
                answer = self.answer(shape, answer_id, order, outbox)
            else:
                answer = make_answer(answer_id, outbox)
            if order.body.stream:
                return await stream_answer(request, self.service, order, answer, self.chunks(order, answer, outbox))
            return await self._whole(request, order, answer, outbox)
        except ApiError:
            raise
        except Exception as error:
            cause = "error"
            raise client_error(order, error) from error
        finally:
            self.service.close(answer_id, cause)

    async def _take(self, request: web.Request, kind: type[GenerationBody]) -> PreparedRequest:
        self.service.require_engine()
        order = await read(request, self.service.config, self.threads, lambda raw: self.order(kind, raw))
        if order.ignored:
            log.debug("request.fields_ignored", fields=listed_names(order.ignored))
        return order

    def order(
        self, kind: type[GenerationBody], raw: Mapping[str, Any], name_of: Callable[[str], str] | None = None
    ) -> PreparedRequest:
        """Validates a body. `ApiError` names the wrong field. May be called in a thread.

        `name_of` gives the names of an API that was converted to this body: for errors here and later.
        """
        if name_of is None:
            return self._order(kind, raw)
        try:
            return replace(self._order(kind, raw), name_of=name_of)
        except ApiError as error:
            raise error.named(name_of) from None

    def _order(self, kind: type[GenerationBody], raw: Mapping[str, Any]) -> PreparedRequest:
        defaults = self.service.require_engine().info.default_params
        body, ignored = self.service.read_body(kind, kind.flattened(raw))
        adapter = self.service.adapter_of(body.model)
        params, make_turn = body.sampling_params(defaults), None
        if body.chat is not None:
            chat_format = self.service.require_chat_format()
            ignored += chat_format.unread(body.chat)
            params, make_turn = chat_format.apply(body.chat, params)
        if body.logits_processors not in (None, []):
            asked = asked_processors(body.logits_processors, self.service.require_engine().logits_processors)
            if body.use_beam_search:
                raise wrong_field(FIELD, NOT_IN_BEAMS)
            params = replace(params, extra_args={**params.extra_args, **asked})
        prompts = body.prompts()
        if adapter is not None:
            prompts = tuple(_of_adapter(prompt, adapter.name) for prompt in prompts)
        return PreparedRequest(
            body, ignored, prompts, params, body.beam_params(), body.echo_options(), make_turn, adapter
        )

    async def submit(self, answer_id: str, order: PreparedRequest, limit_s: float | None = None) -> RequestOutbox:
        """Submits an order to the engine under an id from `Service.open`.

        The deadline is `limit_s` seconds from now, or the body's `timeout_s` if that is None.
        """
        limit_s = order.body.timeout_s if limit_s is None else limit_s
        active = self.service.live[answer_id]
        owner = active.owner
        engine_request = Request(
            answer_id,
            order.prompts,
            order.params,
            priority=order.body.priority,
            cache_salt=self.service.cache_salt(order.body.cache_salt, owner),
            arrival_s=asyncio.get_running_loop().time(),
            adapter=order.adapter,
            owner=owner,
            metadata=metadata_pairs(order.body.metadata),
            session=order.body.prompt_cache_key or active.session,
        )
        if order.beams is not None:
            return self.service.require_engine().submit_search(engine_request, order.beams, deadline_s=limit_s)
        # wait=True: in a burst, submitting waits for microseconds; admission control comes after it
        return await self.service.require_engine().submit(engine_request, wait=True, deadline_s=limit_s)

    def answer(
        self, shape: type[AnswerBuilder], answer_id: str, order: PreparedRequest, outbox: RequestOutbox
    ) -> AnswerBuilder:
        """The object that writes the answer to an order."""
        options = order.body.stream_options
        forced = self.service.config.enable_force_include_usage
        return shape(
            answer_id,
            int(time.time()),
            self.service.model_names[0] if order.adapter is None else order.adapter.name,
            has_usage=forced or bool(options and options.include_usage),
            has_running_usage=bool(options and options.continuous_usage_stats),
            make_turn=order.make_turn,
            has_token_ids=bool(order.body.return_token_ids),
            has_tokens_as_ids=bool(order.body.return_tokens_as_token_ids),
            has_logprobs=order.echo_options.logprobs,
            details_since_s=outbox.times.arrival_s if order.body.return_token_details else None,
        )

    def chunks(self, order: PreparedRequest, answer: AnswerBuilder, outbox: RequestOutbox) -> ChunkIterator:
        """The chunks of the streamed answer, for any transport."""
        add_prompt_echoes, metrics = self.prompt_echoer(order, answer, outbox), lambda: self._metrics(order, outbox)
        return ChunkIterator(
            answer,
            outbox,
            order.num_choices,
            add_prompt_echoes,
            metrics,
            waits_for_tokens=order.echo_options.echo_logprobs,
        )

    def prompt_echoer(
        self, order: PreparedRequest, answer: AnswerBuilder, outbox: RequestOutbox
    ) -> PromptEchoer | None:
        """A function that adds prompt data to the answer for given choices.

        None if the client requested no prompt data.
        """
        if not order.echo_options.anything:
            return None
        answer.choices_per_prompt = order.params.n
        tokenizer, loop = self.service.require_engine().tokenizer, asyncio.get_running_loop()

        async def add_prompt_echoes(choices: Iterable[int]) -> None:
            for index in sorted({choice // order.params.n for choice in choices}.difference(answer.prompts)):
                answer.prompts[index] = await loop.run_in_executor(
                    self.threads, echo_prompt, order.echo_options, outbox, tokenizer, index
                )

        return add_prompt_echoes

    def _metrics(self, order: PreparedRequest, outbox: RequestOutbox) -> Mapping[str, Any] | None:
        is_requested = order.body.return_metrics or self.service.config.enable_request_metrics
        return outbox.metrics() if is_requested else None

    async def _whole(
        self, request: web.Request, order: PreparedRequest, answer: AnswerBuilder, outbox: RequestOutbox
    ) -> web.StreamResponse:
        choices, add_prompt_echoes = answer.choices(order.num_choices), self.prompt_echoer(order, answer, outbox)
        async for deltas in outbox:
            if add_prompt_echoes is not None:
                await add_prompt_echoes(delta.index for delta in deltas if delta.token_ids)
            for delta in deltas:
                answer.keep(choices[delta.index], delta)
        if add_prompt_echoes is not None:
            await add_prompt_echoes(range(order.num_choices))
        spent = usage(outbox.num_prompt_tokens, outbox.num_cached_tokens, choices)
        if order.body.ranks:
            n = order.body.n or 1
            choices, answer.choices_per_prompt = best(choices, order.params.n, n), n
        whole = answer.whole(choices, spent)
        if isinstance(whole, dict) and (times := self._metrics(order, outbox)) is not None:
            whole["metrics"] = times
        body = orjson.dumps(whole)
        return web.Response(body=body, content_type="application/json", headers=ignored_headers(order.ignored))


def _of_adapter(prompt: Prompt, name: str) -> Prompt:
    """The prompt with the name of its adapter, whose own template may render a chat."""
    return prompt if prompt.chat is None else replace(prompt, chat=replace(prompt.chat, adapter=name))
