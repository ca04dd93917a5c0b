"""Checks of a request's Host and Origin, and CORS: protection against foreign web pages.

Any web page can make a browser send requests to a server on the user's own machine. Such a request is recognised by its
Origin. If a foreign name resolves to this address (DNS rebinding), it is recognised by its Host. Both are checked
before the key and before any handler, for WebSockets too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..config import ServerConfig
from ..errors import ApiError, shorten

ANY = "*"
FOREIGN_VERSION = "foreign_version"  # key of a request's item: its HTTP version, if not 1.0 or 1.1
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
EXPOSED_HEADERS = (
    "X-Request-Id, X-Ignored-Fields, Retry-After, X-Queue-Position, X-Millrace-Attempts, Idempotent-Replayed"
)
PREFLIGHT_MAX_AGE_S = 600

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class OriginCheck:
    """The allowed hosts and origins. Pages of this server itself are always allowed."""

    hosts: frozenset[str]  # lower case, without a port; {"*"}: any
    origins: frozenset[str]  # lower case, `scheme://host[:port]`, or "null"; {"*"}: any
    cors_origins: frozenset[str]  # subset of `origins` whose pages may read the answers

    @classmethod
    def of(cls, config: ServerConfig) -> OriginCheck:
        """The gate of these settings.

        On loopback, only the loopback names and `allowed_host` pass. A Unix socket allows any host without
        `allowed_host`, as no browser can reach it. So do other addresses: they require a key, and only the operator
        knows the names that resolve to them.
        """
        hosts = {host.lower() for host in config.allowed_host}
        if config.is_private and config.uds is None:
            hosts |= LOOPBACK_HOSTS | {f"[{config.host}]" if ":" in config.host else config.host.lower()}
        elif hosts:
            hosts |= LOOPBACK_HOSTS
        cors_origins = frozenset(origin.lower() for origin in config.cors_allow_origin)
        origins = cors_origins | {origin.lower() for origin in config.allowed_origin}
        return cls(frozenset(hosts or {ANY}), frozenset(origins), cors_origins)

    def check(self, request: web.BaseRequest) -> None:
        """Raises `ApiError` 403 for a host or an origin that is not allowed.

        Raises `ApiError` 400 for a missing or malformed Host, and for HTTP versions other than 1.0 and 1.1.
        """
        if (version := request.get(FOREIGN_VERSION)) is not None:
            raise ApiError("bad_request", f"HTTP/{version.major}.{version.minor} is not supported: use HTTP/1.1")
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise ApiError("bad_request", "a request must have one Host header")
        named = [*hosts, *_host_of_target(request)]
        for host in named:
            self._check_host(host)
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_allowed(origin, hosts):
            message = f"requests from pages of {shorten(repr(origin), 128)} are refused: see --allowed-origin"
            raise ApiError("origin_not_allowed", message)

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        """The CORS headers of the answer; Allow-Origin only for one of `cors_origins`."""
        origin = request.headers.get("Origin")
        if not self.cors_origins:
            return {}
        if origin is None or not _is_among(origin, self.cors_origins):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a CORS preflight request from an allowed origin; None otherwise.

        It requires no key, as browsers send none with a preflight, and does not reveal which routes exist.
        """
        method = request.headers.get("Access-Control-Request-Method")
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or method is None or origin is None or not _is_among(origin, self.cors_origins):
            return None
        headers = {"Access-Control-Allow-Methods": "GET, POST, DELETE"}
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted  # any name: keys are headers, and cookies are never read
        return web.Response(status=204, headers=headers)

    def _check_host(self, host: str) -> None:
        match = _AUTHORITY.fullmatch(host)
        if match is None:
            raise ApiError("bad_request", f"the Host {shorten(repr(host), 128)} is not a name or address with a port")
        if ANY not in self.hosts and match[1].lower() not in self.hosts:
            message = f"the Host {shorten(repr(match[1]), 128)} is not allowed: add it with --allowed-host"
            raise ApiError("host_not_allowed", message)

    def _is_allowed(self, origin: str, hosts: Iterable[str]) -> bool:
        """Whether the origin is this server itself or an allowed one.

        The server's own origin is compared by host and port only: behind a proxy that ends TLS the scheme differs.
        """
        own = {host.lower() for host in hosts}
        return _is_among(origin, self.origins) or bool(own & _authorities(origin))


def guard(gate: OriginCheck) -> Middleware:
    """Middleware that checks requests with `gate` and answers preflight requests."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        gate.check(request)
        return gate.preflight(request) or await handler(request)

    return middleware


def _is_among(origin: str, origins: frozenset[str]) -> bool:
    return ANY in origins or origin.lower() in origins


def _authorities(origin: str) -> set[str]:
    """Spellings of an origin's host and port in a Host header; a default port may be missing."""
    scheme, separator, authority = origin.lower().partition("://")
    match = _AUTHORITY.fullmatch(authority)
    if not separator or match is None:
        return set()
    host, default = match[1], _DEFAULT_PORTS.get(scheme)
    port = int(match[2]) if match[2] else default
    return {f"{host}:{port}", host} if port == default else {f"{host}:{port}"}


def _host_of_target(request: web.BaseRequest) -> list[str]:
    """The host of an absolute request target, which proxies trust over Host; or empty."""
    target = request.raw_path
    return [urlsplit(target).netloc] if not target.startswith("/") and "://" in target else []
