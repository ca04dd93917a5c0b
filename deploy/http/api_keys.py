"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web

from ..errors import ApiError

MAX_KEY_CHARS = 4096
KEY_SUBPROTOCOL = "openai-insecure-api-key."


class ApiKeys:
    """The keys of a set of routes; an empty set admits every request. Only digests are kept.

    `kind` is the name of such a key in error texts.
    """

    def __init__(self, keys: Iterable[str], kind: str = "API key") -> None:
        self.kind = kind
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def holders(self) -> frozenset[str]:
        """The owner ids of these keys, as `check` returns them."""
        return frozenset(digest.hex()[:16] for digest in self._digests)

    def check(self, request: web.BaseRequest) -> str:
        """The owner id of the request's key, an opaque string; "" if no keys are set.

        `ApiError` 401 if the request has no key, a wrong key or two keys.
        """
        if not self._digests:
            return ""
        holder = self.holder(_presented(request, self.kind))
        if holder is None:
            message = f"the {self.kind} is wrong: send `Authorization: Bearer KEY` or `x-api-key`"
            raise ApiError("invalid_api_key", message)
        return holder

    def admits(self, request: web.BaseRequest) -> bool:
        """Whether the request has one of these keys; False if none are set."""
        try:
            return bool(self.check(request))
        except ApiError:
            return False

    def holder(self, key: str) -> str | None:
        """The owner id of `key`; None if it is not one of these keys."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, for constant time
        return digest.hex()[:16] if any(matches) else None


def _presented(request: web.BaseRequest, kind: str) -> str:
    bearers = request.headers.getall("Authorization", [])
    others = request.headers.getall("x-api-key", []) + _subprotocols(request)
    if not bearers and not others:
        raise ApiError("invalid_api_key", f"an {kind} is needed: send `Authorization: Bearer KEY` or `x-api-key`")
    if len(bearers) > 1 or len(others) > 1:
        raise ApiError("invalid_api_key", "two keys in one request: send one")
    scheme, _, key = bearers[0].partition(" ") if bearers else ("bearer", "", others[0])
    if scheme.lower() != "bearer" or len(key) > MAX_KEY_CHARS:
        raise ApiError("invalid_api_key", "the Authorization header must be `Bearer KEY`")
    return key.strip()


def _subprotocols(request: web.BaseRequest) -> list[str]:
    """API keys among the subprotocols of a WebSocket handshake.

    Browsers cannot set headers on a handshake, so OpenAI's clients send the key there.
    """
    names = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    return [name.removeprefix(KEY_SUBPROTOCOL) for name in names if name.startswith(KEY_SUBPROTOCOL)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
