"""Proof that both ends of a connection have the fleet's key, before the first frame. No socket and no event loop.

    dialer                                    listener
    nonce (32 random bytes)               ->
                                          <-  nonce (32 random bytes)
    HMAC-SHA256(link key, role | nonces)  ->
                                          <-  HMAC-SHA256(link key, role | nonces)

The listener answers only a dialer that has the key, and each role proves it in other words, so no answer of one
connection serves in another. The proof covers the start of a connection and not what follows: between machines whose
network is not trusted, the connection must be encrypted by other means.
"""

from __future__ import annotations

import hmac
import os
import stat
from hashlib import sha256
from pathlib import Path
from typing import Literal

from ..env.log import get_logger

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 1 << 16
NONCE_BYTES = MAC_BYTES = 32
HANDSHAKE_BYTES = NONCE_BYTES + MAC_BYTES  # that each end sends, and reads at most

Role = Literal["dialer", "listener"]


log = get_logger("millrace.runtime")


class AuthError(Exception):
    """The other end of a connection does not have the key. The message tells nothing of the key."""


class KeyRefused(AuthError):
    """The other end refuses this one's key, as far as can be told: it may also have ended at that moment."""


class FleetKey:
    """The secret that all processes of a fleet share. Each use gets a key of its own from it."""

    def __init__(self, secret: bytes) -> None:
        if not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
            raise ValueError(f"a fleet key of {len(secret)} bytes: must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> FleetKey:
        """All bytes of a file, also a line's end. Raises ValueError, which names the file; and OSError.

        Only its owner may be able to write to it; that others can read it is logged.
        """
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MAX_KEY_BYTES + 1)
        check_secret(path, mode, "fleet key")
        try:
            return cls(secret)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; try `(umask 077; head -c 32 /dev/urandom > {path})`") from None

    def derive(self, purpose: str) -> bytes:
        """The key of 32 bytes for one purpose, such as "link"."""
        return hkdf(self._secret, b"millrace fleet", purpose.encode(), 32)

    def __repr__(self) -> str:
        return "FleetKey(...)"


def check_secret(path: Path, mode: int, kind: str) -> None:
    """Raises ValueError if others can write to the file of a secret. That others can read it is logged."""
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path}: others can write to this {kind} (mode {mode & 0o777:o}); try `chmod 600 {path}`")
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        log.warning("link.key_readable", path=str(path), mode=f"{mode & 0o777:o}")


def hkdf(secret: bytes, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """HKDF with SHA-256, as RFC 5869 defines it."""
    pseudorandom = hmac.digest(salt or bytes(32), secret, "sha256")
    output, block = b"", b""
    for number in range(1, -(-num_bytes // 32) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([number]), "sha256")
        output += block
    return output[:num_bytes]


class Handshake:
    """One end's part: send `nonce`, then `feed` what arrives and send what it returns, until `is_done`."""

    def __init__(self, key: bytes, role: Role, nonce: bytes | None = None) -> None:
        self._key = key
        self._role = role
        self.nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._received = b""
        self._has_proven = False
        self.is_done = False

    @property
    def num_wanted(self) -> int:
        """Bytes of the other end's part that are still to come. Read no more: frames follow it."""
        return HANDSHAKE_BYTES - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Takes what arrived, at most `num_wanted` bytes. Raises `AuthError` if the other end does not have the key."""
        if len(data) > self.num_wanted:
            raise AuthError(f"more than {HANDSHAKE_BYTES} bytes came before the proof of the key")
        self._received += data
        answer = b""
        if self._role == "dialer" and len(self._received) >= NONCE_BYTES:
            answer = self._prove()
        if not self.num_wanted:
            other: Role = "listener" if self._role == "dialer" else "dialer"
            if not hmac.compare_digest(self._received[NONCE_BYTES:], self._proof_of(other)):
                raise AuthError(f"the {other} does not have this fleet's key")
            self.is_done = True
            answer += self._prove()
        return answer

    def _prove(self) -> bytes:
        """This end's proof, the first time."""
        has_proven, self._has_proven = self._has_proven, True
        return b"" if has_proven else self._proof_of(self._role)

    def _proof_of(self, role: Role) -> bytes:
        nonces = (self.nonce, self._received[:NONCE_BYTES])
        of_dialer, of_listener = nonces if self._role == "dialer" else nonces[::-1]
        return hmac.new(self._key, role.encode() + b"\0" + of_dialer + of_listener, sha256).digest()
