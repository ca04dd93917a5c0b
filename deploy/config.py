"""The server's settings: addresses, API behaviour, access control, timeouts, logging and diagnostics."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.env.writable import folder_problem
from ..stages.errors import ConfigError

_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of `serve` besides the engine's. Read once, checked once, at the start."""

    # processes
    mode: Literal["auto", "inline", "split"] = "auto"  # split: the step loop in its own process; see cli/serve.py

    # addresses
    host: str = "127.0.0.1"  # loopback; any other address needs a key, or allow_no_key
    port: int = 8000  # 0: a free port, printed in the ready line
    root_path: str = ""  # additional prefix of all routes, such as "/llm" behind a proxy
    uds: str | None = None  # path of a Unix socket to listen on instead of host and port
    max_connections: int = 2048
    ssl_certfile: str | None = None  # PEM, the certificate with its chain; if set, the server speaks HTTPS only
    ssl_keyfile: str | None = None  # PEM, the private key; None: it is in ssl_certfile
    ssl_keyfile_password: str | None = None  # of the private key; from the environment or a file, never a flag

    # API
    served_model_name: tuple[str, ...] = ()  # names that clients may send; answers carry the first; (): the model's
    enable_force_include_usage: bool = False  # usage in every stream, requested or not
    enable_request_metrics: bool = False  # request times in every answer, requested or not
    strict_fields: bool = False  # answer 400 to an unknown field instead of ignoring it
    response_store_bytes: int = 64 * 1024 * 1024  # memory for responses that clients can retrieve later; 0: none
    tool_call_parser: str = "auto"  # by the chat template; none, a name, or package.module:Class, a ToolParser
    enable_auto_tool_choice: bool = True  # the model may choose to call tools
    reasoning_parser: str = "auto"  # by the chat template; none, a name, or package.module:Class, a ReasoningParser
    disable_docs: bool = False  # no /openapi.json and no /docs

    # access
    api_key: tuple[str, ...] = ()  # each grants every route but /admin; (): no key is required
    admin_key: tuple[str, ...] = ()  # each grants /admin and nothing else; (): /admin does not exist
    api_key_file: str | None = None  # more API keys, one per line
    admin_key_file: str | None = None  # more admin keys, one per line
    enable_runtime_lora: bool = False  # API keys may load and unload adapters by vLLM's routes; without any key, all
    allow_no_key: bool = False  # listen beyond loopback without a key
    cache_salt_per_key: bool = False  # clients with different keys share no cached prefix, salted or not
    allowed_host: tuple[str, ...] = ()  # accepted Host names besides loopback's; "*": any
    allowed_origin: tuple[str, ...] = ()  # pages that may send requests, as scheme://host[:port]; "*": any
    cors_allow_origin: tuple[str, ...] = ()  # pages that may send requests and read the answers; "*": any

    # size limit and timeouts
    max_body_bytes: int = 4 * 1024 * 1024
    header_timeout_s: float = 10.0  # from a request's first byte to the end of its headers
    body_timeout_s: float = 30.0  # to the end of its body
    keep_alive_s: float = 60.0  # for the next request on a connection
    stalled_reader_s: float = 30.0  # for a client that does not read its stream
    sse_ping_interval_s: float = 15.0  # silence before a stream gets a comment line; 0: never
    shutdown_timeout_s: float = 30.0  # for running requests when the server stops

    # WebSockets
    ws_max_sockets: int = 1024
    ws_max_streams: int = 512  # concurrent requests on one socket
    ws_ping_interval_s: float = 20.0  # silence before a ping; the client must answer within half of it
    ws_resume_window_s: float = 30.0  # time in which a client can resume its requests after a lost connection

    # logging
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_error_messages: bool = False  # include exception messages, which may quote prompts
    log_requests: bool = True  # one line when a request begins and one when it ends
    log_prompts: int = 0  # characters of each prompt in the first of these lines; 0: none
    stats_interval_s: float = 5.0  # between two status lines while requests run; 0: none

    # tracing
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector's /v1/traces; None: no export

    # diagnostics
    stall_timeout_s: float = 10.0  # without progress, while there is work, before the server reports a stall
    flight_recorder_dir: str | None = None  # folder for the traces of stalls and crashes; None: none is written
    flight_recorder_s: float = 30.0  # length of the trace in each flight file
    profiler_dir: str | None = None  # folder for the torch profiler's files; None: the profiler is off

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port}: must be from 0 (a free port) to 65535")
        for name in (
            "header_timeout_s",
            "body_timeout_s",
            "keep_alive_s",
            "stalled_reader_s",
            "ws_ping_interval_s",
            "ws_resume_window_s",
            "stall_timeout_s",
            "flight_recorder_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0 seconds")
        for name in ("shutdown_timeout_s", "sse_ping_interval_s", "stats_interval_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0 seconds")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f'root_path = "{self.root_path}": must begin with a slash and not end with one')
        for name in ("max_body_bytes", "max_connections", "ws_max_sockets", "ws_max_streams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.otlp_traces_endpoint is not None and not _URL.fullmatch(self.otlp_traces_endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint = {self.otlp_traces_endpoint}: must be like http://127.0.0.1:4318/v1/traces"
            )
        if self.log_prompts < 0:
            raise ConfigError(f"log_prompts = {self.log_prompts}: must be at least 0 characters; 0 logs none")
        if self.response_store_bytes < 0:
            raise ConfigError(f"response_store_bytes = {self.response_store_bytes}: must be at least 0; 0 keeps none")
        for name in ("api_key", "admin_key"):
            if file := getattr(self, f"{name}_file"):  # here, so that keys in files also count without flags
                object.__setattr__(self, name, (*getattr(self, name), *read_keys(Path(file))))
            if not all(map(_is_sendable, getattr(self, name))):
                raise ConfigError(f"{name}: a key must be printable ASCII text without spaces around it, and not empty")
        if set(self.api_key) & set(self.admin_key):
            raise ConfigError(
                "admin_key: one of the keys is also an api_key, which would give all clients admin access; "
                "choose another"
            )
        self._check_names()
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("ssl_keyfile: needs a certificate; set --ssl-certfile too")
        if not (self.is_private or self.api_key or self.allow_no_key):
            raise ConfigError(
                f"host = {self.host} is reachable from other machines: set --api-key, or --allow-no-key if a proxy "
                "checks keys"
            )

    def _check_names(self) -> None:
        for host in self.allowed_host:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"allowed_host = {host}: must be a name or address without a port, or *")
        for name in ("allowed_origin", "cors_allow_origin"):
            for origin in getattr(self, name):
                if not _ORIGIN.fullmatch(origin):
                    raise ConfigError(f"{name} = {origin}: must be like https://chat.example.com, without a path, or *")

    def check_folders(self) -> None:
        """`ConfigError` for a folder in which no file can be written. Makes folders that are missing.

        Called at the start, as these files are written long after.
        """
        for name in ("flight_recorder_dir", "profiler_dir"):
            folder = getattr(self, name)
            if folder is not None and (problem := folder_problem(Path(folder))) is not None:
                raise ConfigError(f"{name} = {folder}: {problem}")

    @property
    def has_open_runtime_lora(self) -> bool:
        """Whether API keys load adapters. Without any, all clients do, unless an admin key was set to keep them out."""
        return self.enable_runtime_lora and bool(self.api_key or not self.admin_key)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _is_sendable(key: str) -> bool:
    """Whether a header can carry this key."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def read_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file, one per line, without empty lines and `#` comments. `ConfigError` if there is none."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', 'not text')}: must have one key per line") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{file}: contains no key: must have one key per line")
    return keys
