"""`POST /tokenize` and `POST /detokenize`: the ids of a text or a chat, and the text of ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ....runtime.env.log import get_logger
from ....stages.messages import ChatPrompt
from ...errors import ApiError
from ...http.body_reader import read
from ...http.responses import answer
from ..schema.validation import read_body
from ..service import Service
from .tokenize_bodies import DetokenizeBody, TokenizeBody

log = get_logger("millrace.deploy")


class TokenizeRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self._threads = threads

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the token ids of a prompt or a chat."""
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
        """`POST /detokenize`: the text of token ids."""
        engine = self.service.require_engine()
        body = await read(request, self.service.config, self._threads, self._detokenize_body)
        vocab_size = engine.info.vocab_size
        if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= vocab_size):
            message = f"tokens: ids must be from 0 to {vocab_size - 1}, the model's vocabulary"
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
        """Calls a tokenizer function in a thread. `ApiError` 500 if it panics.

        NOTE: a panic in Rust raises a `BaseException` that is no `Exception`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("tokenizer.failed", error=type(error).__name__, exc_info=error)
            raise ApiError(
                "tokenizer_error", "the tokenizer failed on this request; this is a server error, see the server's log"
            ) from None
