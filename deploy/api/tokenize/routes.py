"""`POST /tokenize` and `POST /detokenize`: the ids of a text or a chat, and the text of ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ....runtime.env.log import get_logger
from ....stages.messages import ChatPrompt
from ....stages.request_limits import chat_chars
from ...errors import ApiError
from ...http.body_reader import read
from ...http.responses import answer
from ...http.sized_threads import run_sized
from ..openai.api_routes import ApiRoutes, post
from ..openai.prepared_request import ignored_headers
from ..openai.prompts import check_length
from .bodies import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from ....model.text.tokenizer import Tokenizer
    from ....stages.tokenize.prompt_encoder import ModelEncoder
    from ..schema.operation import Operation

LEAST_IDS = 1 << 18  # taken even if the context is shorter: documents are counted, then split
ID_BYTES = 4  # of text for a token id, about

log = get_logger("millrace.deploy")


class TokenizeRoutes(ApiRoutes):
    """The handlers of one server."""

    def table(self) -> list[web.RouteDef]:
        return [post("/tokenize", self.tokenize), post("/detokenize", self.detokenize)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the token ids of a prompt or a chat."""
        engine = self.service.require_engine()
        body, ignored = await read(request, self.service.config, self._threads, self._tokenize_body)
        adapter = self.service.adapter_of(body.model)
        chat = None if body.messages is None else _chat(body, "" if adapter is None else adapter.name)
        count = len(body.prompt or "") if chat is None else chat_chars(chat)
        check_length(count, engine.info.max_model_len, "prompt" if chat is None else "messages")
        tokens = await self._in_thread(count, _encoded, body, chat, engine.tokenizer, engine.encoder)
        strings = None
        if body.return_token_strs:
            strings = await self._in_thread(ID_BYTES * len(tokens), _spelled, engine.tokenizer, tokens)
        max_model_len = engine.info.max_model_len
        data = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}
        return answer(data, headers=ignored_headers(ignored))

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: the text of token ids."""
        engine = self.service.require_engine()
        body, ignored = await read(request, self.service.config, self._threads, self._detokenize_body)
        vocab_size, most = engine.info.vocab_size, max(engine.info.max_model_len, LEAST_IDS)
        if len(body.tokens) > most:
            message = f"tokens: has {len(body.tokens)} ids: at most {most}; send them in pieces"
            raise ApiError("invalid_value", message, param="tokens")
        if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= vocab_size):
            message = f"tokens: ids must be from 0 to {vocab_size - 1}, the model's vocabulary"
            raise ApiError("invalid_value", message, param="tokens")
        num_bytes = ID_BYTES * len(body.tokens)
        prompt = await self._in_thread(num_bytes, engine.tokenizer.decode, body.tokens, False)
        return answer({"prompt": prompt}, headers=ignored_headers(ignored))

    def _tokenize_body(self, raw: Mapping[str, Any]) -> tuple[TokenizeBody, list[str]]:
        body, ignored = self.service.read_body(TokenizeBody, raw)
        self.service.adapter_of(body.model)
        if body.tools and not self.service.require_chat_format().shows_tools(body.chat_template_kwargs or {}):
            ignored.append("tools")
        return body, ignored

    def _detokenize_body(self, raw: Mapping[str, Any]) -> tuple[DetokenizeBody, list[str]]:
        body, ignored = self.service.read_body(DetokenizeBody, raw)
        self.service.adapter_of(body.model)
        return body, ignored

    async def _in_thread(self, num_bytes: int, function: Any, *arguments: Any) -> Any:
        """Calls a tokenizer function, which reads `num_bytes`, in a thread. `ApiError` 500 if it panics.

        NOTE: a panic in Rust raises a `BaseException` that is no `Exception`.
        """
        try:
            return await run_sized(self._threads, num_bytes, function, *arguments)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("tokenizer.failed", error=type(error).__name__, exc_info=error)
            raise ApiError(
                "tokenizer_error", "the tokenizer failed on this request; this is a server error, see the server's log"
            ) from None


def _chat(body: TokenizeBody, adapter: str) -> ChatPrompt:
    assert body.messages is not None
    return ChatPrompt(
        messages=tuple(message.for_template() for message in body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs or {},
        tools=tuple(tool.for_template() for tool in body.tools or ()),
        adapter=adapter,
    )


def _encoded(body: TokenizeBody, chat: ChatPrompt | None, tokenizer: Tokenizer, encoder: ModelEncoder) -> list[int]:
    """The ids after truncation. Runs in a thread."""
    if chat is None:
        token_ids = tokenizer.encode(body.prompt or "", body.add_special_tokens)
    else:
        token_ids = encoder.encode_chat(chat)
    tokens = [int(token_id) for token_id in token_ids]
    if (most := body.truncate_prompt_tokens) is not None:
        tokens = tokens[-most:] if body.truncation_side == "left" else tokens[:most]
    return tokens


def _spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token. Runs in a thread."""
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokens]
