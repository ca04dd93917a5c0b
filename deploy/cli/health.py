"""`millrace health`: asks a running server whether it takes requests. For health checks of containers and scripts."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
import sys
from typing import Any
from urllib.parse import urlsplit

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..server_url import server_url, why_no_answer


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Prints the state. 0 if the server takes requests, or with `--live` if it need not be restarted; 1 otherwise."""
    if not options.wait_s > 0:
        raise ConfigError(f"--wait-s {options.wait_s:g}: must be above 0")
    path = "/health/live" if options.live else "/health/ready"
    connection, prefix = _connection(options.url, server_config, options.wait_s)
    try:
        connection.request("GET", prefix + path, headers={"Host": "localhost"})
        response = connection.getresponse()
        state = json.loads(response.read())
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"millrace: no answer: {why_no_answer(error)}", file=sys.stderr)
        return 1
    print(_line(state))
    return 0 if response.status == 200 else 1


def _line(state: Any) -> str:
    """`stalled: stage decode has had a batch for 12.0 s`."""
    if not isinstance(state, dict) or "status" not in state:
        return "not millrace"
    return str(state["status"]) + (f": {state['reason']}" if state.get("reason") else "")


def _connection(url: str | None, config: ServerConfig, wait_s: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection to `url`, or to the server of these settings on this machine; and the prefix of its routes.

    The certificate is not checked: nothing is sent that must stay secret.
    """
    if url is None and config.uds is not None:
        return _UnixConnection(config.uds, wait_s), config.root_path
    if url is None:
        host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "localhost") else config.host
        name = f"[{host}]" if ":" in host else host
        url = f"{'http' if config.ssl_certfile is None else 'https'}://{name}:{config.port}{config.root_path}"
    parts = urlsplit(server_url("--url", url))
    assert parts.hostname is not None
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=wait_s), parts.path.rstrip("/")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=wait_s, context=context)
    return connection, parts.path.rstrip("/")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, wait_s: float) -> None:
        super().__init__("localhost", timeout=wait_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
