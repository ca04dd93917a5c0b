"""The tokenize stage: converts prompts to token ids.

It runs in threads, so that a long prompt never blocks the event loop. The tokenizer itself is in
`model/text/tokenizer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ...runtime.env.log import get_logger
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.tracer import EventKind
from ...runtime.workers.thread_start import ThreadNotStarted
from ...runtime.workers.worker import Worker
from ..errors import Failed, OutOfResources, Refused, RequestError, field_text
from ..messages import ChatPrompt, Ints, Prompt, Request, TokenRequest
from ..params import SamplingParams
from ..pooling_params import Side
from ..request_limits import RequestLimits

IDS_AT_ONCE = 16_384  # converting a list to an array holds the GIL: 15 ms for 250,000 ids at once
SHORT_TEXT_CHARS = 200  # up to this length a text takes less time than a hop to a thread and back
MAX_QUICK_PROMPTS = 256  # short prompts tokenized in place; more could take tens of milliseconds

log = get_logger("millrace.stages")


class PromptEncoder(Protocol):
    """Converts prompts to token ids.

    Called from several threads at once. Raises `Refused` for an invalid prompt.
    """

    def encode_text(self, text: str) -> Sequence[int]:
        """Token ids of a plain prompt, with the special tokens that the model expects."""

    def encode_chat(self, chat: ChatPrompt) -> Sequence[int]:
        """Token ids of the rendered chat template."""

    def encode_words(self, text: str, param: str = "bad_words") -> Sequence[int]:
        """Token ids of a text without special tokens: of a bad word, or of a prompt that spells its own.

        `param` names the text in errors.
        """

    def encode_text_cut(
        self, text: str, most: int, side: Side | None = None, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """Token ids of a text, at most `most`: the text is cut, special tokens are kept."""

    def encode_pair_cut(
        self, first: str, second: str, most: int, side: Side | None = None, instruction: str | None = None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Token ids of a pair of texts, at most `most`, and for each token 0 or 1: the text that it belongs to.

        Raises `Refused` for an `instruction` to a model that reads none.
        """

    def count_prompt(self, text: str) -> int:
        """Number of tokens of a text with another text behind it."""


class EncodedPrompt(NamedTuple):
    """A tokenized prompt."""

    token_ids: Ints  # [P]
    type_ids: Ints | None = None  # [P] for a pair: the text of each token, 0 or 1
    num_skipped: int = 0  # first tokens that are left out of the pooling


class Tokenize(Stage[Request, TokenRequest]):
    """Sends one `TokenRequest` per prompt, with max_tokens and seed set.

    All prompts of a request are sent together. Up to `num_workers` requests are tokenized at once, each in a thread.
    Requests may therefore overtake each other; schedule restores the order of arrival. Any exception of the tokenizer,
    a panic of its Rust code included, fails only its own request. If a request ends meanwhile, its result is discarded.
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
        # NOTE: after a crash of one item this runs while other items are still in the threads: keep the worker then.
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
        assert self._context is not None
        began_s = self._context.env.now()
        try:
            prompts, params = await self.encode(request)
            self.limits.check_prompts(params, sum(len(encoded.token_ids) for encoded in prompts))
            made = [self._token_request(request, params, p, encoded) for p, encoded in enumerate(prompts)]
        except Refused as error:
            out.fail(request, error)
        except ThreadNotStarted as error:
            log.error("thread.not_started", request_id=request.request_id, reason=str(error))
            out.fail(request, OutOfResources())
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            log.error("tokenizer.failed", request_id=request.request_id, error=type(error).__name__, exc_info=error)
            failed = error if isinstance(error, RequestError) else _failed()
            out.fail(request, failed)
        else:
            service_us = int((self._context.env.now() - began_s) * 1e6)
            for token_request in made:
                out.send(token_request)
                self._trace(token_request, service_us)

    def _trace(self, made: TokenRequest, service_us: int) -> None:
        """`service_us` is the time of the whole request."""
        assert self._context is not None
        tracer, source = self._context.tracer, self._context.source
        counts = (made.first_sequence_id, len(made.token_ids), service_us)
        tracer.emit(EventKind.REQUEST_TOKENIZED, source, 0, *counts)

    async def encode(self, request: Request) -> tuple[list[EncodedPrompt], SamplingParams]:
        """The tokenized prompts, and the params with their bad words tokenized."""
        assert self._context is not None
        if self._context.env.fault("tokenizer.panic"):
            raise TokenizerPanic
        if _is_quick(request):
            return self._encode_all(request)
        if self._worker is None:
            self._worker = self._context.env.worker("tokenize", self.num_workers)
        return await self._worker.submit(self._encode_all, request)

    def _encode_all(self, request: Request) -> tuple[list[EncodedPrompt], SamplingParams]:
        params = with_bad_words(self.encoder, request.params)
        if request.pooling is not None:
            return [encode_pooled(self.encoder, self.limits, request, prompt) for prompt in request.prompts], params
        is_cut = params.truncate_prompt_tokens is not None
        prompts = [encode_prompt(self.encoder, self.limits, prompt, is_cut=is_cut) for prompt in request.prompts]
        return [EncodedPrompt(self.limits.truncate(params, token_ids)) for token_ids in prompts], params

    def _token_request(
        self, request: Request, params: SamplingParams, prompt_index: int, encoded: EncodedPrompt
    ) -> TokenRequest:
        assert self._context is not None
        params = self.limits.complete_params(
            params, len(encoded.token_ids), request.pooling, num_prompts=len(request.prompts)
        )
        if params.seed is None:
            params = replace(params, seed=self._context.env.random("tokenize.seed").getrandbits(63))
        return TokenRequest(
            request_id=request.request_id,
            prompt_index=prompt_index,
            token_ids=encoded.token_ids,
            params=params,
            first_sequence_id=request.first_sequence_id + prompt_index * params.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            arrival_s=request.arrival_s,
            num_expected_cached=request.num_expected_cached,
            pooling=self.limits.complete_pooling(request.pooling, encoded.num_skipped),
            type_ids=encoded.type_ids,
            owner=request.owner,
            metadata=request.metadata,
            session=request.session,
        )


def encode_pooled(encoder: PromptEncoder, limits: RequestLimits, request: Request, prompt: Prompt) -> EncodedPrompt:
    """Tokenizes a prompt of a pooled request, with the model's own prompt before a text.

    Texts that are too long are cut. Raises `Refused` for an invalid prompt; any other error is the tokenizer's.
    """
    pooling, model = request.pooling, limits.pooling
    assert pooling is not None
    most, side = limits.longest_text(pooling), pooling.truncation_side
    if prompt.pair is not None:
        token_ids, type_ids = encoder.encode_pair_cut(*prompt.pair, most, side, prompt.instruction)
        return EncodedPrompt(_checked(token_ids, limits, "prompt"), _as_array(type_ids))
    if prompt.text is None:
        return EncodedPrompt(limits.cut_ids(pooling, encode_prompt(encoder, limits, prompt)))
    put = "" if model is None else model.prompt(pooling.prompt_name, prompt.role)
    token_ids = encoder.encode_text_cut(put + prompt.text, most, side, prompt.add_special_tokens)
    num_skipped = 0 if model is None or model.includes_prompt or not put else encoder.count_prompt(put)
    return EncodedPrompt(_checked(token_ids, limits, "prompt"), num_skipped=num_skipped)


def encode_prompt(encoder: PromptEncoder, limits: RequestLimits, prompt: Prompt, *, is_cut: bool = False) -> Ints:
    """The token ids [P] of a prompt that is not a pair. With `is_cut` they may be too many, as they are cut afterwards.

    Raises `Refused` for an invalid prompt; any other error is the tokenizer's.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    param = "prompt" if prompt.chat is None else "messages"
    if not is_cut:
        for text in _texts_of(prompt):
            limits.check_text(text, lambda piece: len(encoder.encode_words(piece, param)))
    if prompt.chat is not None:
        token_ids = encoder.encode_chat(prompt.chat)
    elif prompt.add_special_tokens:
        token_ids = encoder.encode_text(prompt.text or "")
    else:
        token_ids = encoder.encode_words(prompt.text or "", param)
    return _checked(token_ids, limits, param)


def _texts_of(prompt: Prompt) -> Iterator[str]:
    """The texts that the prompt's tokens hold for certain: of a chat the contents, as a template may drop the rest."""
    if prompt.text is not None:
        yield prompt.text
    for message in prompt.chat.messages if prompt.chat is not None else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text")
            if isinstance(text, str):
                yield text


def _checked(token_ids: Sequence[int], limits: RequestLimits, param: str) -> Ints:
    if not len(token_ids):
        problem = "is empty, and this model's tokenizer adds no token; send at least one character"
        raise Refused(field_text(param, problem), code="empty_prompt")
    made = _as_array(token_ids)
    if int(made.max()) >= limits.vocab_size:
        raise ValueError(f"the tokenizer returned token {made.max()}, the model has {limits.vocab_size}")
    return made


def with_bad_words(encoder: PromptEncoder, params: SamplingParams) -> SamplingParams:
    """`params` with its bad words as token sequences.

    Each word is tokenized as it is, and with a space before it if that gives as many tokens but another first one.
    """
    if not params.bad_words:
        return params
    runs = list(params.bad_words_token_ids)
    for word in params.bad_words:
        plain, spaced = (tuple(map(int, encoder.encode_words(space + word.lstrip()))) for space in ("", " "))
        if plain:
            runs.append(plain)
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            runs.append(spaced)
    return replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(runs)))


class TokenizerPanic(BaseException):
    """An injected fault. Like a panic of the Rust code, it is not an `Exception`."""


def _as_array(token_ids: Sequence[int]) -> Ints:
    pieces = [token_ids[begin : begin + IDS_AT_ONCE] for begin in range(0, len(token_ids), IDS_AT_ONCE)]
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def _is_quick(request: Request) -> bool:
    """Whether tokenizing all prompts in place takes less time than a hop to a thread."""
    is_short = len(request.prompts) <= MAX_QUICK_PROMPTS and not request.params.bad_words
    return is_short and all(is_quick(prompt) for prompt in request.prompts)


def is_quick(prompt: Prompt) -> bool:
    """Whether to tokenize in place: token ids and short text.

    A chat never is, as its template must be rendered.
    """
    return prompt.token_ids is not None or (prompt.text is not None and len(prompt.text) <= SHORT_TEXT_CHARS)


def _failed() -> Failed:
    return Failed("the tokenizer failed on this prompt; see the server's log", code="tokenizer_error")
