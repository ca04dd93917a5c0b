"""The server's settings: addresses, API behaviour, access control, timeouts, logging and diagnostics."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.env.writable import folder_problem
from ..stages.errors import ConfigError
from ..stages.setting import SettingGroup

MAX_FRONT_PROCESSES = 32

_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")

_PROCESSES = SettingGroup("processes")
_LISTENING = SettingGroup("listening")
_API = SettingGroup("API")
_SECURITY = SettingGroup("security")
_TIMEOUTS = SettingGroup("timeouts")
_WEBSOCKETS = SettingGroup("WebSockets")
_LOGGING = SettingGroup("logging")
_DIAGNOSTICS = SettingGroup("diagnostics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of `serve` besides the engine's. Read once, checked once, at the start."""

    mode: Literal["auto", "inline", "split"] = _PROCESSES.setting(
        "auto", "inline: one process; split: HTTP and text in one process, the step loop in another; auto: inline"
    )
    front_processes: int = _PROCESSES.setting(
        1, "processes with HTTP and text that share the port, each for about a core; above 1 the engines have their own"
    )

    host: str = _LISTENING.setting(
        "127.0.0.1", "address to listen on; any but loopback needs --api-key or --allow-no-key"
    )
    port: int = _LISTENING.setting(8000, "port to listen on; 0: a free port, printed in the ready line")
    root_path: str = _LISTENING.setting("", "additional prefix of all routes, such as /llm behind a proxy")
    uds: str | None = _LISTENING.setting(None, "path of a Unix socket to listen on instead of host and port")
    max_connections: int = _LISTENING.setting(
        2048, "maximum open connections; further ones are refused", unit="connections"
    )
    ssl_certfile: str | None = _LISTENING.setting(
        None, "PEM file with the certificate and its chain; serves HTTPS (TLS 1.2 or later) instead of HTTP"
    )
    ssl_keyfile: str | None = _LISTENING.setting(None, "PEM file with the private key; none: it is in ssl_certfile")
    ssl_keyfile_password: str | None = _LISTENING.setting(
        None,
        "password of the private key; only in MILLRACE_SSL_KEYFILE_PASSWORD or the --config file, not a flag",
        is_secret=True,
        has_flag=False,
    )

    served_model_name: tuple[str, ...] = _API.setting(
        (),
        "model name that clients may send; answers carry the first; may be repeated; none: the Hub id, or the "
        "folder's name",
    )
    enable_force_include_usage: bool = _API.setting(False, "include usage in every stream, requested or not")
    enable_request_metrics: bool = _API.setting(False, "include request times in every answer, requested or not")
    strict_fields: bool = _API.setting(False, "reject unknown fields with 400 instead of ignoring them")
    response_store_bytes: int = _API.setting(
        64 * 1024 * 1024, "memory in bytes for stored answers of /v1/responses; 0: store none"
    )
    tool_call_parser: str = _API.setting(
        "auto",
        "tool call format: hermes, llama3_json, mistral, pythonic, none, or package.module:Class, a subclass of "
        "millrace.deploy.api.parsers.ToolParser; auto: by the chat template",
    )
    enable_auto_tool_choice: bool = _API.setting(True, "let the model choose whether to call a tool")
    reasoning_parser: str = _API.setting(
        "auto",
        "reasoning format: deepseek_r1, qwen3, none, or package.module:Class, a subclass of "
        "millrace.deploy.api.parsers.ReasoningParser; auto: by the chat template",
    )
    disable_docs: bool = _API.setting(False, "do not serve /openapi.json and /docs")

    api_key: tuple[str, ...] = _SECURITY.setting(
        (), "API key that clients must send, except for /health; may be repeated", is_key=True
    )
    admin_key: tuple[str, ...] = _SECURITY.setting(
        (), "key for the /admin routes only; none: no /admin routes; may be repeated", is_key=True
    )
    api_key_file: str | None = _SECURITY.setting(None, "file with more API keys, one per line")
    admin_key_file: str | None = _SECURITY.setting(None, "file with more admin keys, one per line")
    enable_runtime_lora: bool = _SECURITY.setting(
        False,
        "let API keys load and unload LoRA adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter, not the "
        "admin key alone; clients then decide what a name computes for others",
    )
    allow_no_key: bool = _SECURITY.setting(False, "listen beyond loopback without a key")
    cache_salt_per_key: bool = _SECURITY.setting(False, "do not share cached prefixes between API keys")
    allowed_host: tuple[str, ...] = _SECURITY.setting(
        (), "accepted Host name besides loopback's; may be repeated; *: any"
    )
    allowed_origin: tuple[str, ...] = _SECURITY.setting(
        (), "origin that may send requests and open WebSockets: scheme://host[:port]; may be repeated; *: any"
    )
    cors_allow_origin: tuple[str, ...] = _SECURITY.setting(
        (), "origin that may send requests and read the answers; may be repeated; *: any"
    )

    max_body_bytes: int = _API.setting(4 * 1024 * 1024, "maximum size of a request body in bytes")

    header_timeout_s: float = _TIMEOUTS.setting(10.0, "seconds from a request's first byte to the end of its headers")
    body_timeout_s: float = _TIMEOUTS.setting(30.0, "seconds to receive the body of a request")
    keep_alive_s: float = _TIMEOUTS.setting(60.0, "seconds to keep an idle connection open")
    stalled_reader_s: float = _TIMEOUTS.setting(30.0, "seconds before a stream that its client does not read is ended")
    sse_ping_interval_s: float = _TIMEOUTS.setting(
        15.0, "seconds of silence in a stream before a comment line is sent; 0: never"
    )
    shutdown_timeout_s: float = _TIMEOUTS.setting(30.0, "seconds for running requests to end at shutdown")
    lame_duck_s: float = _TIMEOUTS.setting(
        0.0, "seconds after SIGTERM in which the server says that it is not ready, and still takes requests"
    )

    link_timeout_s: float = _TIMEOUTS.setting(
        10.0,
        "seconds of silence after which a front and an engine are lost to each other; while other engines are heard, "
        "requests leave a silent one sooner",
    )

    ws_max_sockets: int = _WEBSOCKETS.setting(1024, "maximum open WebSockets; further ones are refused", unit="sockets")
    ws_max_streams: int = _WEBSOCKETS.setting(
        512, "maximum concurrent requests per WebSocket; further ones get 429", unit="requests"
    )
    ws_ping_interval_s: float = _WEBSOCKETS.setting(
        20.0, "seconds of silence before a ping; the client must answer within half of it"
    )
    ws_resume_window_s: float = _WEBSOCKETS.setting(
        30.0, "seconds in which a resumable request can be resumed after its connection is lost"
    )

    log_format: Literal["console", "json"] = _LOGGING.setting("console", "format of the log on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = _LOGGING.setting("info", "minimum severity to log")
    log_error_messages: bool = _LOGGING.setting(
        False, "log exception messages, not only their place in the code; they may quote prompts"
    )
    log_requests: bool = _LOGGING.setting(True, "log the start and the end of each request")
    log_prompts: int = _LOGGING.setting(
        0, "characters of each prompt to log with log_requests; 0: none", unit="characters"
    )
    stats_interval_s: float = _LOGGING.setting(5.0, "seconds between two status lines while requests run; 0: none")
    otlp_traces_endpoint: str | None = _LOGGING.setting(
        None, "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces; none: no export"
    )

    stall_timeout_s: float = _DIAGNOSTICS.setting(
        10.0, "seconds without progress, while there is work, before /health reports a stall"
    )
    flight_recorder_dir: str | None = _DIAGNOSTICS.setting(
        None, "folder for the traces of stalls and crashes; none: write none"
    )
    flight_recorder_s: float = _DIAGNOSTICS.setting(30.0, "length of the trace in each flight file in seconds")
    profiler_dir: str | None = _DIAGNOSTICS.setting(
        None, "folder for files of torch's profiler, started with the admin key; none: profiler off"
    )

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
            "link_timeout_s",
            "stall_timeout_s",
            "flight_recorder_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0 seconds")
        for name in ("shutdown_timeout_s", "lame_duck_s", "sse_ping_interval_s", "stats_interval_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0 seconds")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f'root_path = "{self.root_path}": must begin with a slash and not end with one')
        if not 1 <= self.front_processes <= MAX_FRONT_PROCESSES:
            raise ConfigError(
                f"front_processes = {self.front_processes}: must be from 1 to {MAX_FRONT_PROCESSES}; for more, run "
                "`millrace route` on more machines"
            )
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
