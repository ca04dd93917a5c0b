"""The messages of requests: what a client asks, before and after it became tokens. See `messages.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.message import Moment, message
from .params import SamplingParams
from .pooling_params import PoolingParams, Role

Ints = NDArray[np.int32]


@message
class Prompt:
    """One prompt in exactly one of four forms.

    `token_ids` [P] skips the tokenizer; `pair` is two texts to score.
    """

    text: str | None = None
    token_ids: Ints | None = None
    chat: ChatPrompt | None = None
    pair: tuple[str, str] | None = None
    role: Role | None = None  # of a text in a search, for which an embedding model may have a prompt
    add_special_tokens: bool = True  # to a text, as its tokenizer does: BOS, EOS; False: the text spells its own
    instruction: str | None = None  # of a pair: what makes a document right for a query; None: the model's own


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The input of the chat template.

    The `content` of a message is text or a list of text parts.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    adapter: str = ""  # the name of the adapter that answers, whose own template may render the chat


@message
class AdapterRef:
    """The LoRA adapter of a request. The name is for people; `digest` says what it computes."""

    name: str
    digest: str = ""  # SHA-256 in hex; "" until the adapter is loaded
    pinned: tuple[str, ...] = ()  # digests of the adapters that keep their device slots from now on, sorted


@message
class Request:
    """A client's request. It has `len(prompts) * params.n` sequences.

    Choice j of prompt p has the id `first_sequence_id + p * n + j`. Its client sees the index `p * n + j`.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    first_sequence_id: int = -1  # the exit assigns it when the request enters
    priority: int = 0  # lower goes first
    arrival_s: Moment = 0.0
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    parent_id: str | None = None  # set on a step of a beam search: the id of the client's request
    num_expected_cached: int = 0  # prompt tokens likely in the prefix cache; a hint, need not be right
    pooling: PoolingParams | None = None  # set: the result is a vector per prompt instead of text; n is 1
    adapter: AdapterRef | None = None  # None: the base model
    owner: str = ""  # whose request it is: an id of the API key, never the key; "": the server has no keys
    metadata: Mapping[str, str] = field(default_factory=dict)  # the client's own; the engine ignores it
    session: str = ""  # of several engines, requests of the same one go to the same, unless another is much better

    @property
    def is_warm_up(self) -> bool:
        """Whether the engine asks it itself, before it serves."""
        return self.request_id.startswith("warm-up")

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n


@message
class TokenRequest:
    """One tokenized prompt of a request.

    Its `params.n` choices have consecutive ids from `first_sequence_id`.
    """

    request_id: str
    prompt_index: int
    token_ids: Ints  # [P], 1 <= P < max_model_len; up to it if no token is generated
    params: SamplingParams  # max_tokens and seed are set, never None
    first_sequence_id: int
    priority: int = 0
    arrival_s: Moment = 0.0
    cache_salt: str = ""
    num_expected_cached: int = 0  # as in `Request`
    pooling: PoolingParams | None = None  # with its kind set; the prompt may then fill the context
    type_ids: Ints | None = None  # [P] 0 or 1: the text of a pair that each token belongs to; None: a single text
    # choice -> answer tokens from an engine process that died; a missing choice has finished. None: a new request
    generated: Mapping[int, Ints] | None = None
    adapter: AdapterRef | None = None  # with its digest; None: the base model
    owner: str = ""  # as in `Request`
    metadata: Mapping[str, str] = field(default_factory=dict)
    session: str = ""  # as in `Request`

    @property
    def is_warm_up(self) -> bool:
        """As in `Request`."""
        return self.request_id.startswith("warm-up")
