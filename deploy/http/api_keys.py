"""Who may come in: API keys, compared in a time that says nothing about them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web

from ..errors import ApiError

MAX_KEY_CHARS = 4096
KEY_SUBPROTOCOL = "openai-insecure-api-key."


class Keys:
    """The keys that open some routes; without any, everybody may come in. Keeps digests only. `kind` is what errors
    call such a key."""

    def __init__(self, keys: Iterable[str], kind: str = "API key") -> None:
        self.kind = kind
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def holders(self) -> frozenset[str]:
        """What `check` calls those who bring one of these."""
        return frozenset(digest.hex()[:16] for digest in self._digests)

    def check(self, request: web.BaseRequest) -> str:
        """The holder of the request's key, as an opaque word ("" without keys). `ApiError` 401 if it brings none, a
        wrong one, or two."""
        if not self._digests:
            return ""
        holder = self.holder(_presented(request, self.kind))
        if holder is None:
            message = f"the {self.kind} is wrong: send `Authorization: Bearer KEY` or `x-api-key`"
            raise ApiError("invalid_api_key", message)
        return holder

    def holder(self, key: str) -> str | None:
        """Whose key it is, as `check` says it; None if it is none of these."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
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
    """Keys among a WebSocket's subprotocols: where OpenAI's clients put them in a browser, which takes no headers."""
    names = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    return [name.removeprefix(KEY_SUBPROTOCOL) for name in names if name.startswith(KEY_SUBPROTOCOL)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
