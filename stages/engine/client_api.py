"""The asyncio API of an engine: generate, chat, beam search, embed and score.

Implemented with requests and outboxes only; does not depend on any stage.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..beam_search.algorithm import BeamParams
from ..exit.outboxes import RequestOutbox
from ..messages import AdapterRef, ChatPrompt, Prompt, Request
from ..outputs import EmbeddingRequestOutput, ModelInfo, OutputKind, RequestOutput, ScoringRequestOutput
from ..params import SamplingParams
from ..pooling_params import Floats, PoolingParams
from ..request_limits import as_token_ids
from .pooled_requests import ScoringPairs, as_texts, check_scoring, pooled_request, read_vectors
from .results import read_outputs

PromptLike = str | Sequence[int] | Prompt
Messages = Sequence[Mapping[str, Any]]


class ClientApi(ABC):
    """The API methods of an engine, to be called on its event loop.

    `Engine` documents the abstract ones.
    """

    def __init__(self) -> None:
        self._request_numbers = itertools.count()

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @abstractmethod
    async def submit(
        self, request: Request, *, wait: bool = False, deadline_s: float | None = None
    ) -> RequestOutbox: ...

    @abstractmethod
    def submit_search(
        self, request: Request, beams: BeamParams, *, deadline_s: float | None = None
    ) -> RequestOutbox: ...

    @abstractmethod
    def abort(self, request_id: str, cause: str = "cancel") -> bool: ...

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        owner: str = "",
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_kind: OutputKind = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """Continues a prompt: text, or token ids.

        Yields new text ("delta"), all text so far ("cumulative"), or one whole output ("final"), by `output_kind`.
        Leaving the loop cancels the request. Raises `RequestError` if it fails. `params` default to the model's. A
        request shares cached prefixes only with requests of the same `cache_salt`. `adapter` is the name of a LoRA
        adapter; None is the base model. `owner` and `metadata` are for stages of the caller's own.
        """
        chosen = params or self.info.default_params
        prompts = (_as_prompt(prompt),)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter": _ref(adapter)}
        options |= {"owner": owner, "metadata": metadata or {}}
        request = Request(self._request_id(request_id), prompts, chosen, **options)
        outbox = await self.submit(request, wait=True, deadline_s=timeout_s)
        async for output in self._outputs(outbox, output_kind):
            yield output

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        owner: str = "",
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_kind: OutputKind = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """Answers `messages`, each with a role and a content. Otherwise as `generate`.

        Without `params`, the answer may be as long as the context allows.
        """
        chat = ChatPrompt(
            tuple(messages),
            add_generation_prompt,
            continue_final_message,
            template_kwargs or {},
            adapter=adapter or "",
        )
        chosen = params or replace(self.info.default_params, max_tokens=None)
        prompts = (Prompt(chat=chat),)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter": _ref(adapter)}
        options |= {"owner": owner, "metadata": metadata or {}}
        request = Request(self._request_id(request_id), prompts, chosen, **options)
        outbox = await self.submit(request, wait=True, deadline_s=timeout_s)
        async for output in self._outputs(outbox, output_kind):
            yield output

    async def beam_search(
        self,
        prompt: PromptLike,
        width: int,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        *,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """The `width` likeliest answers to a prompt, best first, each with its score.

        `BeamParams` defines the score. `params` may set stop strings and ids, min_tokens, ignore_eos and logprobs.
        Parameters that choose among tokens are refused; n and max_tokens are ignored. Cancelling the caller ends the
        search. Raises `RequestError` if it fails.
        """
        beams = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        chosen = replace(params or SamplingParams(temperature=0.0), n=width, max_tokens=max_tokens)
        prompts = (_as_prompt(prompt),)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter": _ref(adapter)}
        request = Request(self._request_id(request_id), prompts, chosen, **options)
        outbox = self.submit_search(request, beams, deadline_s=timeout_s)
        (output,) = [output async for output in self._outputs(outbox, "final")]
        return output

    async def embed(
        self,
        prompt: PromptLike,
        pooling: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt: one vector pooled from its hidden states.

        Its length is 1, unless the model or `pooling` says otherwise. It is scheduled together with sequences that
        generate. Raises `RequestError` if it fails.
        """
        request = pooled_request(
            self._request_id(request_id),
            [_as_prompt(prompt)],
            pooling or PoolingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        outbox, (vector,) = await self._pool(request, timeout_s)
        return EmbeddingRequestOutput(
            request.request_id, vector, outbox.num_prompt_tokens, num_cached_tokens=outbox.num_cached_tokens
        )

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document answers its query: one query for all documents, or one each.

        The score is that of a reranker, or with any other model the similarity of two embeddings. `instruction` says
        what makes a document right, to a Qwen3-Reranker.
        """
        check_scoring(self.info)
        pairs, tasks = ScoringPairs(as_texts(queries), as_texts(documents), instruction), self.info.tasks
        request = pairs.request(self._request_id(request_id), tasks, priority=priority)
        outbox, vectors = await self._pool(request, timeout_s)
        scores, counts = pairs.scores(vectors, tasks, self.info.pooling), pairs.num_tokens(outbox, tasks)
        return [ScoringRequestOutput(request.request_id, *each) for each in zip(scores, counts, strict=True)]

    async def _pool(self, request: Request, timeout_s: float | None) -> tuple[RequestOutbox, list[Floats]]:
        outbox = await self.submit(request, wait=True, deadline_s=timeout_s)
        try:
            return outbox, await read_vectors(outbox)
        finally:
            self.abort(request.request_id)

    async def _outputs(self, outbox: RequestOutbox, kind: OutputKind) -> AsyncIterator[RequestOutput]:
        try:
            async for output in read_outputs(outbox, kind):
                yield output
        finally:
            self.abort(outbox.request_id)

    def _request_id(self, request_id: str | None) -> str:
        return f"request-{next(self._request_numbers)}" if request_id is None else request_id


def _ref(adapter: str | None) -> AdapterRef | None:
    return None if adapter is None else AdapterRef(adapter)


def _as_prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    return Prompt(token_ids=as_token_ids(prompt))
