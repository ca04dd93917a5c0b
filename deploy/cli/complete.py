"""`millrace complete PROMPT`: completes a text in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys

from ...runtime.env.log import configure
from ...stages.config import EngineConfig
from ...stages.errors import RequestError
from ..config import ServerConfig
from .model_client import ModelClientError, in_flags, open_client


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command; the exit code is 1 if the request failed."""
    configure(server_config.log_format, server_config.log_level)
    return asyncio.run(_complete(options, engine_config, server_config))


async def _complete(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    try:
        async with open_client(options, engine_config, server_config) as client:
            print(options.prompt, end="", flush=True)
            async for text in client.complete(options.prompt):
                print(text, end="", flush=True)
            print(flush=True)
            if options.stats:
                print(client.stats.describe(), file=sys.stderr)
    except (ModelClientError, RequestError) as error:
        print(f"\nmillrace: {in_flags(error)}", file=sys.stderr)
        return 1
    return 0
