"""`millrace trace`: the last seconds of a running server's trace, as a file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import aiohttp

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..output_file import check_output_file, write_output_file
from ..server_url import server_url, why_no_answer

TIMEOUT_S = 60.0
REASONS = {  # HTTP status -> what to do
    401: "the server has another admin key; give its own with --admin-key",
    404: "the server has no admin key; start it with --admin-key too",
}


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if the server does not answer, or answers with an error."""
    if not server_config.admin_key:
        raise ConfigError(
            "admin_key: the trace covers the requests of all clients; start the server with --admin-key KEY, and give"
            " the same key here"
        )
    url = server_url("--url", options.url)
    file = None if options.output_file == "-" else Path(options.output_file)
    check_output_file("--output-file", file)
    try:
        document = asyncio.run(fetch(url, server_config.admin_key[0], options.seconds))
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = REASONS.get(getattr(error, "status", 0), why_no_answer(error))
        print(f"millrace: {url} returned no trace: {reason}", file=sys.stderr)
        return 1
    if file is None:
        sys.stdout.buffer.write(document)
    else:
        write_output_file("--output-file", file, document)
        print(f"{file}: {len(document):,} bytes; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0


async def fetch(url: str, admin_key: str, seconds: float) -> bytes:
    """Fetches the trace as JSON. Raises `aiohttp.ClientError` for an error answer."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {admin_key}"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        query = {"seconds": str(seconds)}
        async with session.get(url + "/admin/trace", params=query, raise_for_status=True) as response:
            return await response.read()
