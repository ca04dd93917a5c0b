"""`millrace chat`: a conversation in the terminal, one line per turn, until the end of input."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator

from ...runtime.env.log import configure
from ...stages.config import EngineConfig
from ...stages.errors import RequestError
from ..config import ServerConfig
from .batch_file import LineReader
from .model_client import ModelClient, ModelClientError, in_flags, open_client


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command; the exit code is 1 if a turn failed."""
    configure(server_config.log_format, server_config.log_level)
    try:
        return asyncio.run(_chat(options, engine_config, server_config))
    except RequestError as error:  # of the options
        print(f"millrace: {in_flags(error)}", file=sys.stderr)
        return 1


async def _chat(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    messages = [{"role": "system", "content": options.system}] if options.system else []
    num_failed = 0
    async with open_client(options, engine_config, server_config) as client:
        async for line in _lines(server_config.max_body_bytes):
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": await _answer(client, messages)})
            except (ModelClientError, RequestError) as error:
                print(f"\nmillrace: {in_flags(error)}", file=sys.stderr)
                messages.pop()
                num_failed += 1
            else:
                if options.stats:
                    print(client.stats.describe(), file=sys.stderr)
    return 1 if num_failed else 0


async def _answer(client: ModelClient, messages: list[dict[str, str]]) -> str:
    texts = []
    async for text in client.chat(messages):
        print(text, end="", flush=True)
        texts.append(text)
    print(flush=True)
    return "".join(texts)


async def _lines(max_bytes: int) -> AsyncIterator[str]:
    """The user's lines that are not blank, until the end of input.

    They are read by a thread that Ctrl-C need not wait for, though it waits for a line.
    """
    reader = LineReader(open(sys.stdin.fileno(), "rb", closefd=False), max_bytes)  # noqa: SIM115 - the reader closes it
    try:
        _show_prompt()
        async for line in reader:
            if line.data is None:
                print(f"millrace: a line must have at most {max_bytes} bytes", file=sys.stderr)
            else:
                yield line.data.decode(errors="replace").strip()
            _show_prompt()
        if sys.stdin.isatty():
            print(flush=True)
    finally:
        reader.close()


def _show_prompt() -> None:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
