"""Whom a browser may speak for: a request's Host and Origin, looked at before its key, and CORS.

A page of anybody's can make its reader's browser talk to a server on the reader's own machine. What tells such a
request from one of ours is its Origin, and, where a foreign name was made to resolve to this address, its Host. Both
are checked here, for WebSockets as for all else, before a handler runs.
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
FOREIGN_VERSION = "foreign_version"  # a request's item: its HTTP version, if not 1.0 or 1.1
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
EXPOSED_HEADERS = "X-Request-Id, X-Ignored-Fields, Retry-After"
PREFLIGHT_MAX_AGE_S = 600

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Gate:
    """Which hosts and origins may pass. A page of the server's own may, whatever else is allowed."""

    hosts: frozenset[str]  # lower case, without a port; {"*"}: any
    origins: frozenset[str]  # lower case, `scheme://host[:port]`, or "null"; {"*"}: any
    cors_origins: frozenset[str]  # of those, whose pages may read the answers

    @classmethod
    def of(cls, config: ServerConfig) -> Gate:
        """What the settings allow. On loopback the loopback's names, on a Unix socket and elsewhere any host: the first
        is out of a browser's reach, elsewhere a key is asked for, and which names lead here nobody but the operator
        knows (`allowed_host`)."""
        hosts = {host.lower() for host in config.allowed_host}
        if config.is_private and config.uds is None:
            hosts |= LOOPBACK_HOSTS | {f"[{config.host}]" if ":" in config.host else config.host.lower()}
        elif hosts:
            hosts |= LOOPBACK_HOSTS
        cors_origins = frozenset(origin.lower() for origin in config.cors_allow_origin)
        origins = cors_origins | {origin.lower() for origin in config.allowed_origin}
        return cls(frozenset(hosts or {ANY}), frozenset(origins), cors_origins)

    def check(self, request: web.BaseRequest) -> None:
        """Raises `ApiError` 403 for a request by a host or from an origin that is not allowed; for one without a host
        or with a malformed one, or of another HTTP than 1.x, 400."""
        if (version := request.get(FOREIGN_VERSION)) is not None:
            raise ApiError("bad_request", f"HTTP/{version.major}.{version.minor} is not spoken here: HTTP/1.1 is")
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise ApiError("bad_request", "a request must have one Host header")
        named = [*hosts, *_host_of_target(request)]
        for host in named:
            self._check_host(host)
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_allowed(origin, hosts):
            message = f"requests of pages of {shorten(repr(origin), 128)} are refused: --allowed-origin lets them in"
            raise ApiError("origin_not_allowed", message)

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        """What lets the page that asks read the answer; nothing if it may not, or is no foreign page."""
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
        """The answer to a browser that asks beforehand whether its page may; None if this is no such question, or the
        page may not. It needs no key, as browsers send none with it, and says nothing of what there is."""
        method = request.headers.get("Access-Control-Request-Method")
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or method is None or origin is None or not _is_among(origin, self.cors_origins):
            return None
        headers = {"Access-Control-Allow-Methods": "GET, POST, DELETE"}
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted  # any: keys are in headers, and no cookie counts here
        return web.Response(status=204, headers=headers)

    def _check_host(self, host: str) -> None:
        match = _AUTHORITY.fullmatch(host)
        if match is None:
            raise ApiError("bad_request", f"the Host {shorten(repr(host), 128)} is not a name or address with a port")
        if ANY not in self.hosts and match[1].lower() not in self.hosts:
            message = f"this server is not called {shorten(repr(match[1]), 128)}: --allowed-host gives it that name"
            raise ApiError("host_not_allowed", message)

    def _is_allowed(self, origin: str, hosts: Iterable[str]) -> bool:
        """Whether one of its own pages asks, or one that is allowed. Pages are told apart by host and port: behind a
        proxy that ends TLS the scheme is another one here."""
        own = {host.lower() for host in hosts}
        return _is_among(origin, self.origins) or bool(own & _authorities(origin))


def guard(gate: Gate) -> Middleware:
    """Lets pass what the gate does, and answers preflight requests."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        gate.check(request)
        return gate.preflight(request) or await handler(request)

    return middleware


def _is_among(origin: str, origins: frozenset[str]) -> bool:
    return ANY in origins or origin.lower() in origins


def _authorities(origin: str) -> set[str]:
    """How a Host header may spell the host and port of an origin: with a default port, and without."""
    scheme, separator, authority = origin.lower().partition("://")
    match = _AUTHORITY.fullmatch(authority)
    if not separator or match is None:
        return set()
    host, default = match[1], _DEFAULT_PORTS.get(scheme)
    port = int(match[2]) if match[2] else default
    return {f"{host}:{port}", host} if port == default else {f"{host}:{port}"}


def _host_of_target(request: web.BaseRequest) -> list[str]:
    """The host that an absolute request target names besides the header: proxies believe that one."""
    target = request.raw_path
    return [urlsplit(target).netloc] if not target.startswith("/") and "://" in target else []
