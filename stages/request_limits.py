"""Checks of a request against the model: task, vocabulary and context length.

Plain functions. Intake, tokenize and start-up share them. Checks that depend on the load are in
`stages/intake/admission.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..model.pooling import PoolingConfig
from .errors import ErrorText, Refused, field_text
from .messages import ChatPrompt, Ints, Prompt, Request
from .outputs import ModelInfo
from .params import MAX_LOGPROBS, SamplingParams
from .pooling_params import MAX_INPUTS, PoolingParams
from .tasks import Task, check_task, task_of

MAX_PROMPTS = 256
MAX_SEQUENCES = 512  # prompts x n of one request
MAX_LOGPROB_BYTES = 8 * 2**20  # of one request, also of its prompts; 8 bytes per token and per likeliest token
MAX_CHARS_PER_TOKEN = 16  # of context; a longer text is counted in pieces before it is tokenized
PIECE_CHARS = 1 << 16  # of such a text


def longest_sequence(num_blocks: int, block_size: int) -> int:
    """Tokens of the longest sequence that fits into an otherwise empty pool."""
    return num_blocks * block_size


def as_token_ids(values: Sequence[int] | Ints, param: str = "prompt") -> Ints:
    """A prompt given as token ids, as [P] i32.

    Raises `Refused` unless each is a whole number in [0, 2**31).
    """
    if isinstance(values, np.ndarray) and values.dtype == np.int32:
        return values
    for at, value in enumerate(values):
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_whole or not 0 <= value < 2**31:
            text = f"[{at}] = {_short(value)}: a token id must be a whole number from 0"
            raise Refused(ErrorText(("", param, text)))
    return np.asarray(values, np.int32)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that one model sets to requests."""

    vocab_size: int  # rows of the output layer
    max_model_len: int  # tokens, prompt plus answer; at most the pool's `longest_sequence`
    tasks: frozenset[Task] = frozenset({"generate", "embed"})
    pooling: PoolingConfig | None = None  # of an embedding model
    default_max_tokens: int | None = None  # the checkpoint's; None: up to the end of the context
    max_logprobs: int = MAX_LOGPROBS  # likeliest tokens at each place

    @classmethod
    def of(cls, info: ModelInfo, max_logprobs: int = MAX_LOGPROBS) -> RequestLimits:
        """The limits of a loaded model."""
        return cls(info.vocab_size, info.max_model_len, info.tasks, info.pooling, info.default_max_tokens, max_logprobs)

    def check(self, request: Request) -> None:
        """Raises `Refused` for everything that shows without rendering or tokenizing a prompt."""
        params = request.params
        check_task(task_of(request), self.tasks)
        if not request.prompts:
            raise Refused(field_text("prompt", "is an empty list; send at least one prompt"), code="empty_prompt")
        most = MAX_PROMPTS if request.pooling is None else MAX_INPUTS
        if len(request.prompts) > most:
            raise Refused(f"{len(request.prompts)} prompts in one request: at most {most}", param="prompt")
        if request.pooling is not None:
            self._check_pooling(request)
        elif request.num_sequences > MAX_SEQUENCES:
            begin, end = (
                f"{len(request.prompts)} prompts x ",
                f" = {params.n}: at most {MAX_SEQUENCES} choices a request",
            )
            raise Refused(ErrorText((begin, "n", end)), param="n")
        self._check_logprobs(request)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.thinking_budget is not None:
            self._check_ids("thinking_budget", params.thinking_budget.start_ids + params.thinking_budget.end_ids)
        for prompt in request.prompts:
            self._check_prompt(prompt, request)

    def complete_pooling(self, pooling: PoolingParams | None, num_skipped: int = 0) -> PoolingParams | None:
        """`pooling` with the model's values for what it leaves open, and the first tokens to leave out."""
        return pooling if pooling is None or self.pooling is None else pooling.complete(self.pooling, num_skipped)

    def complete_params(
        self, params: SamplingParams, num_prompt: int, pooling: PoolingParams | None = None, *, num_prompts: int = 1
    ) -> SamplingParams:
        """`params` with max_tokens set to a number, for one of `num_prompts` prompts, of `num_prompt` tokens.

        Raises `Refused` if prompt and answer together exceed the context. A pooled prompt may fill the context.
        """
        limit = self.max_model_len
        if pooling is not None:
            if num_prompt > limit:
                raise self._too_long(f"and the prompt has {num_prompt}: shorten it")
            return params
        if num_prompt > (limit if params.max_tokens == 0 else limit - 1):
            raise self._too_long(f"answer included, and the prompt has {num_prompt}: shorten it")
        if params.max_tokens is None:
            most = limit - num_prompt
            if params.logprobs:
                num_answers = num_prompts * params.n
                most = min(most, max(1, MAX_LOGPROB_BYTES // (8 * num_answers * (params.logprobs + 1))))
            default = most if self.default_max_tokens is None else max(self.default_max_tokens, params.min_tokens)
            return replace(params, max_tokens=min(most, default))
        if num_prompt + params.max_tokens > limit:
            longest = (
                f" = {params.max_tokens} asks for as many more: "
                f"shorten the prompt, or ask for at most {limit - num_prompt}"
            )
            raise self._too_long(f"but the prompt has {num_prompt} and ", "max_tokens", longest)
        return params

    def check_prompts(self, params: SamplingParams, num_tokens: int) -> None:
        """Raises `Refused` if prompt_logprobs of `num_tokens` tokens exceed `MAX_LOGPROB_BYTES`."""
        if params.prompt_logprobs is None:
            return
        num_bytes = num_tokens * (params.prompt_logprobs + 1) * 8
        if num_bytes > MAX_LOGPROB_BYTES:
            k, most = params.prompt_logprobs, MAX_LOGPROB_BYTES // 8
            text = f" = {k} of {num_tokens} prompt tokens: tokens x (k + 1) must be at most {most}"
            text = f"{text}; ask for fewer, or send a shorter prompt"
            raise Refused(ErrorText(("", "prompt_logprobs", text)))

    def _check_logprobs(self, request: Request) -> None:
        """Raises `Refused` for more than `max_logprobs`, or if the longest answers' exceed `MAX_LOGPROB_BYTES`."""
        params = request.params
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                problem = f"this server allows at most {self.max_logprobs}"
                raise Refused(field_text(name, problem, str(getattr(params, name))))
        if not params.logprobs or params.max_tokens is None:
            return
        most_tokens = MAX_LOGPROB_BYTES // (8 * (params.logprobs + 1))
        if request.num_sequences * params.max_tokens > most_tokens:
            begin = ("", "logprobs", f" = {params.logprobs} of {request.num_sequences} answers of ")
            middle = ("max_tokens", f" = {params.max_tokens}: answers x ")
            end = f" must be at most {most_tokens}; ask for fewer answers, tokens or logprobs"
            raise Refused(ErrorText((*begin, *middle, "max_tokens", end)))

    def _check_ids(self, param: str, token_ids: Any) -> None:
        for token_id in token_ids:
            if token_id >= self.vocab_size:
                problem = f" names token {token_id}: the vocabulary has {self.vocab_size}"
                raise Refused(ErrorText(("", param, problem)))

    def _check_pooling(self, request: Request) -> None:
        assert request.pooling is not None
        if request.params.n != 1:
            raise Refused(field_text("n", "a text has one embedding", str(request.params.n)))
        if self.pooling is not None:
            request.pooling.check(self.pooling)

    def _check_prompt(self, prompt: Prompt, request: Request) -> None:
        if prompt.token_ids is not None:
            self._check_token_ids(prompt.token_ids, request)
            return
        if prompt.chat is not None and not prompt.chat.messages:
            raise Refused(field_text("messages", "is empty; send at least one message"), code="empty_prompt")

    def check_text(self, text: str, count_tokens: Callable[[str], int]) -> None:
        """Raises `Refused` for a text that cannot fit the context, without tokenizing all of it.

        Only a text of over `MAX_CHARS_PER_TOKEN` characters for each token is counted, piece by piece and up to twice
        the context: a cut between two pieces adds a few tokens, so the whole text has more than the context, too.
        """
        if len(text) <= MAX_CHARS_PER_TOKEN * self.max_model_len:
            return
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARS):
            num_tokens += count_tokens(text[begin : begin + PIECE_CHARS])
            if num_tokens > 2 * self.max_model_len:
                raise self._too_long(f"and the prompt, of {len(text)} characters, has more than that: shorten it")

    def _too_long(self, problem: str, *pieces: str) -> Refused:
        """The error of a prompt that exceeds the context; `pieces` as in `ErrorText`, behind `problem`.

        NOTE: it begins as OpenAI's message does, since clients match it in order to shorten their prompts.
        """
        begin = f"this model's maximum context length is {self.max_model_len} tokens, {problem}"
        return Refused(ErrorText((begin, *pieces)), code="context_length_exceeded", param="prompt")

    def _check_token_ids(self, token_ids: Ints, request: Request) -> None:
        if not len(token_ids):
            raise Refused(field_text("prompt", "has no token ids; send at least one"), code="empty_prompt")
        least, most = int(token_ids.min()), int(token_ids.max())
        if least < 0 or most >= self.vocab_size:
            wrong = least if least < 0 else most
            problem = f" holds token id {wrong}: ids go from 0 to {self.vocab_size - 1}"
            raise Refused(ErrorText(("", "prompt", problem)))
        kept = self.truncate(request.params, token_ids) if request.pooling is None else token_ids
        if request.pooling is not None:
            kept = self.cut_ids(request.pooling, token_ids)
        self.complete_params(request.params, len(kept), request.pooling)

    def longest_text(self, pooling: PoolingParams) -> int:
        """The number of tokens that a longer text is cut to."""
        longest = self.max_model_len
        if self.pooling is not None and self.pooling.max_tokens is not None:
            longest = min(longest, self.pooling.max_tokens)
        most = pooling.truncate_prompt_tokens
        return longest if most in (None, -1) else min(longest, most)

    def cut_ids(self, pooling: PoolingParams, token_ids: Ints) -> Ints:
        """Token ids that a client sent, [P]: cut only if the request says so."""
        if pooling.truncate_prompt_tokens is None:
            return token_ids
        most = self.longest_text(pooling)
        return token_ids[-most:] if pooling.truncation_side == "left" else token_ids[:most]

    def truncate(self, params: SamplingParams, token_ids: Ints) -> Ints:
        """The prompt after `truncate_prompt_tokens`, [P]."""
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            most = max(1, self.max_model_len - max(1, params.max_tokens or 1))
        return token_ids[-most:] if params.truncation_side == "left" else token_ids[:most]


def estimated_tokens(request: Request, max_model_len: int) -> int:
    """Upper estimate of prompt and answer tokens; text counts as four characters a token."""
    total = 0
    for prompt in request.prompts:
        num_prompt = _prompt_chars(prompt) // 4 if prompt.token_ids is None else len(prompt.token_ids)
        num_left = max(1, max_model_len - num_prompt)
        max_tokens = request.params.max_tokens
        total += num_prompt + request.params.n * (num_left if max_tokens is None else min(max_tokens, num_left))
    return total


def _prompt_chars(prompt: Prompt) -> int:
    if prompt.pair is not None:
        return sum(map(len, (*prompt.pair, prompt.instruction or "")))
    return len(prompt.text) if prompt.text is not None else chat_chars(prompt.chat)


def chat_chars(chat: ChatPrompt | None) -> int:
    """Characters of a chat: the texts of messages and documents, and the tools as JSON."""
    if chat is None:
        return 0
    return _chars(chat.messages) + _chars(chat.documents) + (len(json.dumps(chat.tools)) if chat.tools else 0)


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(part) for part in value.values())
    return sum(_chars(part) for part in value) if isinstance(value, (list, tuple)) else 0


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 64 else shown[:61] + "..."
