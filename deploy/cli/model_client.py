"""Clients of the terminal commands: an engine in this process, or a server. Both stream text."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from ...stages.config import EngineConfig
from ...stages.errors import RequestError
from ...stages.messages import ChatPrompt, Prompt, Request
from ..config import ServerConfig
from ..server_url import server_url, why_no_answer

if TYPE_CHECKING:
    import aiohttp

    from ...stages.engine.engine import Engine

Messages = Sequence[dict[str, str]]
FLAGS = {"seed": "--sampling-seed"} | {
    name: f"--{name.replace('_', '-')}" for name in ("max_tokens", "temperature", "top_p", "stop", "model")
}


class ModelClientError(Exception):
    """The server refused the request or did not answer. The message is the server's where it has one."""


@dataclass(slots=True)
class AnswerStats:
    """Times and token counts of one answer."""

    began_s: float
    first_s: float | None = None
    ended_s: float | None = None
    num_prompt: int = 0
    num_generated: int = 0

    def describe(self) -> str:
        """The figures in one line. The rate counts the tokens after the first."""
        first, ended = self.first_s or self.began_s, self.ended_s or self.began_s
        rate = (self.num_generated - 1) / (ended - first) if self.num_generated > 1 and ended > first else 0.0
        return (
            f"prompt {self.num_prompt} tokens, answer {self.num_generated} tokens, "
            f"TTFT {1e3 * (first - self.began_s):.1f} ms, {rate:.1f} tokens/s"
        )


class ModelClient(Protocol):
    """Generates text for the terminal. `stats` belongs to the current answer."""

    stats: AnswerStats

    def complete(self, prompt: str) -> AsyncIterator[str]:
        """The text that follows `prompt`, piece by piece."""

    def chat(self, messages: Messages) -> AsyncIterator[str]:
        """The next turn, piece by piece."""


def open_client(
    options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig
) -> AbstractAsyncContextManager[ModelClient]:
    """The client for the options: the server at `--url`, or an engine in this process.

    An engine raises `RequestError` for options that it refuses; see `in_flags`.
    """
    requested = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.sampling_seed,
        "stop": tuple(options.stop) if options.stop else None,
    }
    params = {name: value for name, value in requested.items() if value is not None}
    if options.url is not None:
        url = server_url("--url", options.url)
        return _remote(url, engine_config.model, server_config.api_key, params)
    return _local(engine_config, params)


def in_flags(error: Exception) -> str:
    """The text of an error, with the engine's names of fields as the flags that set them."""
    return str(error.text.named(lambda name: FLAGS.get(name, name)) if isinstance(error, RequestError) else error)


# -- in this process


@asynccontextmanager
async def _local(config: EngineConfig, params: dict[str, Any]) -> AsyncIterator[ModelClient]:
    from ...stages.engine.engine import Engine  # imports torch

    async with Engine(config) as engine:
        yield LocalClient(engine, params)


class LocalClient:
    """Uses an engine in this process. Sampling fields that are not given have the checkpoint's defaults."""

    def __init__(self, engine: Engine, params: dict[str, Any]) -> None:
        self.stats = AnswerStats(0.0)
        self._engine = engine
        self._params = replace(engine.info.default_params, **params)
        self._ids = itertools.count()

    async def complete(self, prompt: str) -> AsyncIterator[str]:
        async for text in self._generate(Prompt(text=prompt)):
            yield text

    async def chat(self, messages: Messages) -> AsyncIterator[str]:
        async for text in self._generate(Prompt(chat=ChatPrompt(messages=tuple(messages)))):
            yield text

    async def _generate(self, prompt: Prompt) -> AsyncIterator[str]:
        self.stats = stats = AnswerStats(time.perf_counter())
        request = Request(f"terminal-{next(self._ids)}", (prompt,), self._params)
        outbox = await self._engine.submit(request)
        try:
            async for deltas in outbox:
                stats.ended_s = time.perf_counter()
                stats.first_s = stats.first_s or stats.ended_s
                stats.num_prompt, stats.num_generated = outbox.num_prompt_tokens, outbox.num_generated_tokens
                for delta in deltas:
                    yield delta.text
        finally:
            self._engine.abort(request.request_id, "cancel")


# -- at a server


@asynccontextmanager
async def _remote(
    url: str, model: str | None, api_key: Sequence[str], params: dict[str, Any]
) -> AsyncIterator[ModelClient]:
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key[0]}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        yield RemoteClient(session, url, model, params)


class RemoteClient:
    """Uses a server with OpenAI's API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str | None, params: dict[str, Any]) -> None:
        self.stats = AnswerStats(0.0)
        self._session = session
        self._url = url
        self._body = params | ({"model": model} if model is not None else {})

    async def complete(self, prompt: str) -> AsyncIterator[str]:
        async for choice in self._post("/v1/completions", {"prompt": prompt}):
            yield choice["text"]

    async def chat(self, messages: Messages) -> AsyncIterator[str]:
        async for choice in self._post("/v1/chat/completions", {"messages": list(messages)}):
            yield choice["delta"].get("content") or ""

    async def _post(self, path: str, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The choices of each event; usage goes to `stats`."""
        import aiohttp

        self.stats = stats = AnswerStats(time.perf_counter())
        body = self._body | fields | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(self._url + path, json=body) as response:
                if response.status != 200:
                    raise ModelClientError(_message(await response.read(), response.status))
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    event = orjson.loads(line[6:])
                    if "error" in event:
                        raise ModelClientError(event["error"]["message"])
                    if event.get("usage"):
                        stats.num_prompt = event["usage"]["prompt_tokens"]
                        stats.num_generated = event["usage"]["completion_tokens"]
                    for choice in event["choices"]:
                        stats.ended_s = time.perf_counter()
                        stats.first_s = stats.first_s or stats.ended_s
                        yield choice
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ModelClientError(f"{self._url} does not answer: {why_no_answer(error)}") from None


def _message(body: bytes, status: int) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"the server answered {status}"
