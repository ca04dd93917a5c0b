"""`LLM`: the blocking API, for scripts and notebooks.

Lists of prompts in, lists of answers out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, TypeVar

from ...runtime.workers.thread_start import start_thread
from ..config import EngineConfig
from ..outputs import EmbeddingRequestOutput, ModelInfo, RequestOutput, ScoringRequestOutput
from ..params import SamplingParams
from ..pooling_params import MAX_PAIRS, PoolingParams
from .client_api import Messages, PromptLike
from .engine import Engine
from .pooled_requests import ScoringPairs, as_texts

T = TypeVar("T")
OutputT = TypeVar("OutputT")
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model with blocking calls, for scripts and notebooks.

        LLM(model="...").generate(["Once", "Twice"], SamplingParams(max_tokens=20))

    The engine runs on an event loop and thread of its own. Calls block the calling thread, and also work inside a
    running event loop. Several threads may call at the same time. Close it, or use it as a context manager. With
    `data_parallel_size` above 1 the engine is a `FleetEngine`, and with `executor` "ray" a `RayEngine`.
    """

    def __init__(self, model: str | None = None, config: EngineConfig | None = None, **overrides: Any) -> None:
        if model is not None:
            overrides["model"] = model
        config = config or EngineConfig()
        if "itl_target_ms" not in overrides:
            config = config.for_whole_answers()
        self._engine = _engine_class(config, overrides)(config, **overrides)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millrace-llm", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._loop.close()
            raise
        self._is_closed = False
        try:
            self._run(self._engine.start())
            self._loop.call_soon_threadsafe(self._engine.give_way)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._engine.info

    @property
    def engine(self) -> Engine:
        """The engine, on its own event loop: inspect it, but call none of its coroutines."""
        return self._engine

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: Params = None,
        use_tqdm: bool = True,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continues each prompt, text or token ids; the answers are in the order of the prompts.

        `params` are for all prompts, or a list with one for each; the default is the model's. Raises the first
        `RequestError` of any prompt, and cancels the others.
        """
        prompt_list = _as_prompts(prompts)
        chosen = _each(params, len(prompt_list))
        streams = [
            self._engine.generate(prompt, one, priority=priority, output_kind="final")
            for prompt, one in zip(prompt_list, chosen, strict=True)
        ]
        return self._run(self._gather(streams, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one chat, a list of messages, or several. `options` are those of `Engine.chat`."""
        chats = _as_chats(messages)
        chosen = _each(params, len(chats))
        streams = [
            self._engine.chat(chat, one, output_kind="final", **options)
            for chat, one in zip(chats, chosen, strict=True)
        ]
        return self._run(self._gather(streams, use_tqdm))

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        width: int,
        max_tokens: int | None = 16,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """The `width` likeliest answers to each prompt, best first.

        `options` are those of `Engine.beam_search`.
        """

        async def search(prompt: PromptLike) -> AsyncIterator[RequestOutput]:
            yield await self._engine.beam_search(prompt, width, max_tokens, **options)

        return self._run(self._gather([search(prompt) for prompt in _as_prompts(prompts)], use_tqdm))

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in their order. `options` are those of `Engine.embed`."""

        async def embed(prompt: PromptLike) -> AsyncIterator[EmbeddingRequestOutput]:
            yield await self._engine.embed(prompt, pooling, **options)

        return self._run(self._gather([embed(prompt) for prompt in _as_prompts(prompts)], use_tqdm))

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> list[ScoringRequestOutput]:
        """How well each document answers its query: one query for all documents, or one each.

        `options` are those of `Engine.score`.
        """
        pairs = ScoringPairs(as_texts(queries), as_texts(documents))

        async def score() -> list[ScoringRequestOutput]:
            parts = [await self._engine.score(part.queries, part.documents, **options) for part in pairs.cut(MAX_PAIRS)]
            return [output for part in parts for output in part]

        return self._run(score())

    def close(self) -> None:
        """Frees everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._run(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: also stops the coroutine
            raise

    async def _gather(self, streams: Sequence[AsyncIterator[OutputT]], use_tqdm: bool) -> list[OutputT]:
        semaphore = asyncio.Semaphore(self._engine.config.max_waiting_requests)  # as many as the engine lets wait
        bar = _progress_bar(len(streams)) if use_tqdm else None

        async def answer(stream: AsyncIterator[OutputT]) -> OutputT:
            async with semaphore:
                outputs = [output async for output in stream]
            if bar is not None:
                if isinstance(outputs[-1], RequestOutput):
                    bar.set_postfix_str(f"{outputs[-1].num_generated_tokens} tokens in the last", refresh=False)
                bar.update()
            return outputs[-1]

        tasks = [asyncio.ensure_future(answer(stream)) for stream in streams]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if bar is not None:
                bar.close()


def _engine_class(config: EngineConfig, overrides: Mapping[str, Any]) -> type[Engine]:
    found = Engine  # the others by name, as their rooms are above this one
    if overrides.get("executor", config.executor) == "ray":
        found = import_module("...deploy.ray.ray_engine", __package__).RayEngine
    elif overrides.get("data_parallel_size", config.data_parallel_size) > 1:
        found = import_module("..fleet.fleet_engine", __package__).FleetEngine
    return found


def _as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A list of prompts, also from a single prompt: a string, or a list of numbers."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        many = list(prompts)
        if not many or not isinstance(many[0], int):
            return many  # type: ignore[return-value]
    return [prompts]  # type: ignore[list-item]


def _as_chats(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _each(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} params for {count} prompts: give one for all, or one each")
    return list(params)


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="answers", unit="prompt", dynamic_ncols=True)
