"""`millrace bench serve`: latency and throughput of a running server, over server-sent events."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import aiohttp
import orjson

from ....stages.config import EngineConfig
from ....stages.errors import ConfigError
from ...config import ServerConfig
from ...server_url import server_url, why_no_answer
from .load import BenchRequest, arrivals, random_requests, read_requests
from .measures import RequestRecord, Stopwatch, parse_goodput, summarize
from .offline import make_rng
from .report import at_least_one, check_result, print_errors, progress, publish

TEXTS = ("text", "content", "reasoning", "reasoning_content", "tool_calls")  # fields of a piece with tokens
VOCAB_SIZE = 256  # for random prompts, if the server does not report its own


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a request failed."""
    at_least_one(options, "input_len", "output_len", "num_prompts", "max_concurrency")
    if not options.request_rate > 0:
        raise ConfigError(f"--request-rate {options.request_rate:g}: must be above 0, or inf")
    check_result(options)
    return asyncio.run(_run(options, engine_config, server_config.api_key))


async def _run(options: argparse.Namespace, config: EngineConfig, api_key: Sequence[str]) -> int:
    goodput_ms = parse_goodput(options.goodput or ())
    headers = {"Authorization": f"Bearer {api_key[0]}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        client = BenchClient(session, server_url("--base-url", options.base_url), options.endpoint)
        client.model = config.model or await client.served_model()
        client.ignores_eos = options.dataset_path is None if options.ignore_eos is None else options.ignore_eos
        requests = await _make_requests(client, options, config.seed)
        # not measured, as in vLLM's bench; it may leave its prompt's prefix cached
        first = await client.run_request(requests[0])
        if first.error is not None:
            raise ConfigError(f"{client.url} does not answer the first request: {first.error}")
        times_s = arrivals(len(requests), options.request_rate, make_rng(config.seed + 1))
        duration_s, records = await measure(client, requests, times_s, options.max_concurrency)
    report = summarize(records, duration_s, goodput_ms)
    publish(options, "Serving Benchmark Result", _settings(options, client, len(requests)), report)
    print_errors(record.error for record in records if record.error is not None)
    return 1 if report["failed"] else 0


def _settings(options: argparse.Namespace, client: BenchClient, num_prompts: int) -> dict[str, Any]:
    rate = options.request_rate
    return {
        "model_id": client.model,
        "base_url": client.url,
        "endpoint": client.path,
        "num_prompts": num_prompts,
        "request_rate": rate if rate < float("inf") else "inf",
        "max_concurrency": options.max_concurrency,
    }


async def _make_requests(client: BenchClient, options: argparse.Namespace, seed: int) -> list[BenchRequest]:
    if options.dataset_path is not None:
        return read_requests(options.dataset_path, options.num_prompts, options.output_len)
    if client.is_chat:
        raise ConfigError(f"--endpoint {client.path} takes text, and random prompts are token ids: set --dataset-path")
    sizes = options.num_prompts, options.input_len, options.output_len
    return random_requests(*sizes, await client.vocab_size(), make_rng(seed), options.random_range_ratio)


async def measure(
    client: BenchClient, requests: Sequence[BenchRequest], times_s: Sequence[float], max_concurrency: int | None
) -> tuple[float, list[RequestRecord]]:
    """(seconds of the whole run, record of each request).

    Request `i` is sent `times_s[i]` seconds after the start, or later if `max_concurrency` requests are running. Its
    own times begin when it is sent.
    """
    room = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    began_s = time.perf_counter()

    async def one(request: BenchRequest, at_s: float, bar: Any) -> RequestRecord:
        await asyncio.sleep(at_s - (time.perf_counter() - began_s))
        async with room:
            record = await client.run_request(request)
        bar.update()
        return record

    with progress(len(requests), "request") as bar:
        records = await asyncio.gather(*(one(*each, bar) for each in zip(requests, times_s, strict=True)))
        return time.perf_counter() - began_s, records


class BenchClient:
    """Sends requests to one server with OpenAI's API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, path: str) -> None:
        self.url = url
        self.path = path
        self.model = ""
        self.ignores_eos = False
        self._session = session

    @property
    def is_chat(self) -> bool:
        """Whether the endpoint takes messages."""
        return self.path.endswith("/chat/completions")

    async def served_model(self) -> str:
        """The name of the server's first model. `ConfigError` if the server reports none."""
        try:
            async with self._session.get(self.url + "/v1/models") as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ConfigError(f"{self.url}/v1/models lists no model: {why_no_answer(error)}") from None
        try:
            return str(orjson.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            reason = f"HTTP {response.status}, {body[:200].decode(errors='replace')!r}"
            raise ConfigError(f"{self.url}/v1/models lists no model: {reason}; check --base-url and --model") from None

    async def vocab_size(self) -> int:
        """The model's vocabulary size from `/server_info`; `VOCAB_SIZE` if the server has no such route."""
        try:
            async with self._session.get(self.url + "/server_info") as response:
                return int(orjson.loads(await response.read())["model"]["vocab_size"])
        except (TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError):
            return VOCAB_SIZE

    async def run_request(self, request: BenchRequest) -> RequestRecord:
        """Runs one request and returns its record."""
        try:
            return await self._stream(orjson.dumps(self._body(request)))
        except (TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            return RequestRecord(error=why_no_answer(error))

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "max_tokens": request.num_output,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        if self.ignores_eos:
            body["ignore_eos"] = True
        if not self.is_chat:
            return body | {"prompt": request.prompt}
        return body | {"messages": request.messages or [{"role": "user", "content": request.prompt}]}

    async def _stream(self, data: bytes) -> RequestRecord:
        usage: dict[str, Any] = {}
        watch = Stopwatch(time.perf_counter())
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self.url + self.path, data=data, headers=headers) as response:
            if response.status != 200:
                return RequestRecord(error=f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                now_s = time.perf_counter()
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    return RequestRecord(error=str(event["error"]["message"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    watch.piece(now_s) if has_text(choice) else watch.end(now_s)
        return watch.record(usage.get("prompt_tokens", 0), usage.get("completion_tokens", watch.num_pieces))


def has_text(choice: dict[str, Any]) -> bool:
    """Whether a piece has tokens; a piece with only a role or a finish reason has none."""
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in TEXTS)
