"""The tokenize stage: prompts become token ids, in threads, so that a long one never holds the event loop.

Knows order, lengths and who pays for an error. Refuses to know how tokens are made: that is `model/tokenizer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np

from ..runtime.env import Worker
from ..runtime.log import get_logger
from ..runtime.stage import Context, Crash, Outlet, Stage
from .errors import Failed, Refused, RequestError
from .limits import RequestLimits
from .messages import ChatPrompt, Ints, Prompt, Request, TokenRequest

IDS_AT_ONCE = 16_384  # making an array of a list holds the interpreter: a quarter of a million ids at once, 15 ms
SHORT_TEXT_CHARS = 200  # tokenized in place: a hop to a thread and back costs more than such a text does

log = get_logger("millrace.stages")


class PromptEncoder(Protocol):
    """Turns prompts into token ids. Called from several threads at once; `Refused` is the client's fault."""

    def encode_text(self, text: str) -> Sequence[int]:
        """Token ids of a plain prompt, with the special tokens that the model wants before it."""

    def encode_chat(self, chat: ChatPrompt) -> Sequence[int]:
        """Token ids of the rendered chat template."""


class Tokenize(Stage[Request, TokenRequest]):
    """Sends one `TokenRequest` a prompt, all of a request together, with max_tokens and seed made numbers.

    Up to `num_workers` requests are worked on at once, each in a thread; so requests may overtake each other, and
    schedule puts them in order again. Whatever the tokenizer throws, a panic of its Rust code included, ends that
    request alone. A request that ends meanwhile is dropped; what its thread makes of it is thrown away.
    """

    on_crash: ClassVar = Crash.ISOLATE
    error_code: ClassVar = "tokenizer_error"

    def __init__(self, encoder: PromptEncoder, limits: RequestLimits, num_workers: int = 2) -> None:
        self.encoder = encoder
        self.limits = limits
        self.num_workers = num_workers
        self._context: Context | None = None
        self._worker: Worker | None = None
        self._at_work: set[asyncio.Task[None]] = set()

    @property
    def concurrency(self) -> int:
        return self.num_workers

    async def setup(self, context: Context) -> None:
        self._context = context

    async def teardown(self) -> None:
        # NOTE: after a crash of one item this runs while others are still at work in the threads; the worker stays.
        if all(task.cancelling() for task in self._at_work) and self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.aclose()

    async def handle(self, batch: Sequence[Request], out: Outlet[TokenRequest]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        try:
            for request in batch:
                await self._carry(request, out)
        finally:
            self._at_work.discard(task)

    async def _carry(self, request: Request, out: Outlet[TokenRequest]) -> None:
        try:
            prompts = await self._encode(request)
            made = [self._token_request(request, p, token_ids) for p, token_ids in enumerate(prompts)]
        except Refused as error:
            out.fail(request, error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is no Exception
            log.error("tokenizer.failed", request_id=request.request_id, error=type(error).__name__, exc_info=error)
            failed = error if isinstance(error, RequestError) else _failed()
            out.fail(request, failed)
        else:
            for token_request in made:
                out.send(token_request)

    async def _encode(self, request: Request) -> list[Ints]:
        assert self._context is not None
        if self._context.env.fault("tokenizer.panic"):
            raise TokenizerPanic
        if all(is_quick(prompt) for prompt in request.prompts):
            return self._encode_all(request.prompts)
        if self._worker is None:
            self._worker = self._context.env.worker("tokenize", self.num_workers)
        return await self._worker.submit(self._encode_all, request.prompts)

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[Ints]:
        return [encode_prompt(self.encoder, self.limits, prompt) for prompt in prompts]

    def _token_request(self, request: Request, prompt_index: int, token_ids: Ints) -> TokenRequest:
        assert self._context is not None
        params = self.limits.settle(request.params, len(token_ids))
        if params.seed is None:
            params = replace(params, seed=self._context.env.random("tokenize.seed").getrandbits(63))
        return TokenRequest(
            request_id=request.request_id,
            prompt_index=prompt_index,
            token_ids=token_ids,
            params=params,
            first_sequence_id=request.first_sequence_id + prompt_index * params.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival_s=request.arrival_s,
            num_expected_cached=request.num_expected_cached,
        )


def encode_prompt(encoder: PromptEncoder, limits: RequestLimits, prompt: Prompt) -> Ints:
    """The token ids of a prompt in any form, [P]. `Refused` is the client's fault, anything else the tokenizer's."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    if prompt.chat is not None:
        token_ids, param = encoder.encode_chat(prompt.chat), "messages"
    else:
        token_ids, param = encoder.encode_text(prompt.text or ""), "prompt"
    if not len(token_ids):
        raise Refused(f"{param}: nothing is left of it as tokens", code="empty_prompt", param=param)
    made = _as_array(token_ids)
    if int(made.max()) >= limits.vocab_size:
        raise ValueError(f"the tokenizer made token {made.max()}, the model knows {limits.vocab_size}")
    return made


class TokenizerPanic(BaseException):
    """A fault point struck: the tokenizer fails as its Rust code would, past every `except Exception`."""


def _as_array(token_ids: Sequence[int]) -> Ints:
    pieces = [token_ids[begin : begin + IDS_AT_ONCE] for begin in range(0, len(token_ids), IDS_AT_ONCE)]
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def is_quick(prompt: Prompt) -> bool:
    """Whether making tokens of it takes less than a hop to a thread: ids, and short text. A chat has a template."""
    return prompt.token_ids is not None or (prompt.text is not None and len(prompt.text) <= SHORT_TEXT_CHARS)


def _failed() -> Failed:
    return Failed("the tokenizer failed on this prompt; the log has more", code="tokenizer_error")
