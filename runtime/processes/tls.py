"""The certificates of a fleet: what an end of an encrypted connection shows, and what it accepts of the other.

Both ends show a certificate, and each must be from an authority in the other's file. A dialer also checks the name that
it dials; a listener checks no name, as fronts have none. TLS 1.3 alone is spoken: both ends are of this package.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..env.log import get_logger
from .auth import AuthError, Role, check_secret

FileRole = Literal["cert", "key", "ca"]

NOT_YET_VALID, HAS_EXPIRED = 9, 10  # OpenSSL's codes of a certificate that is refused
UNKNOWN_ISSUER = (18, 19, 20, 21)
WRONG_NAME = (62, 64)  # of a host, and an IP address
WRONG_USE = 26

log = get_logger("millrace.runtime")


class TlsError(AuthError):
    """TLS with the other end of a connection failed. The message says why, and what to change."""


class CertificateError(ValueError):
    """A file of TLS cannot be used. The message begins with its path; `file` says which one it is."""

    def __init__(self, file: FileRole, message: str) -> None:
        super().__init__(message)
        self.file: FileRole = file


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: Path  # this end's, with those between it and its authority behind it
    key: Path  # its private key, without a password
    ca: Path  # of all authorities that certificates of the fleet are from


class FleetTls:
    """This end's certificate and authorities, for all connections of one role. Raises `CertificateError`.

    Files that were replaced are read again for the next connection. While the new ones cannot be used, the ones before
    stay, and a line of the log says why. Connections that exist stay as they are.
    """

    def __init__(self, files: TlsFiles, role: Role) -> None:
        self.files, self.role = files, role
        self._seen = self._look()
        self._context = _context(files, role)

    def connection(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, server_name: str | None) -> ssl.SSLObject:
        """One end of a new connection. `server_name`: what the certificate of a listener must be for."""
        if (seen := self._look()) != self._seen:
            self._seen = seen
            self._read_again()
        name = server_name if self.role == "dialer" else None
        return self._context.wrap_bio(incoming, outgoing, server_side=self.role == "listener", server_hostname=name)

    def why(self, error: ssl.SSLError) -> str:
        """An error of a connection in words, with what to change."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._why_refused(error)
        reason = (error.reason or "").replace("_", " ").lower() or str(error)
        if "unknown ca" in reason:
            return f"it knows no authority of {self.files.cert}; add that to its file of authorities"
        if "certificate expired" in reason:
            return f"it says that {self.files.cert} has expired; renew the certificate"
        if "bad certificate" in reason:
            return f"it refuses {self.files.cert}; its own log says why"
        if "did not return a certificate" in reason:
            return "it shows no certificate; start it with one"
        return f"TLS failed ({reason}); both ends must be started with TLS, and their files must belong together"

    def _why_refused(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code == HAS_EXPIRED:
            return "its certificate has expired; renew it there"
        if error.verify_code == NOT_YET_VALID:
            return "its certificate is not valid yet; compare the clocks of both machines"
        if error.verify_code in UNKNOWN_ISSUER:
            return f"its certificate is from no authority in {self.files.ca}; add that authority, or issue it anew"
        if error.verify_code in WRONG_NAME:
            wrong = error.verify_message.rstrip(".")
            return f"{wrong}; issue one with this name as subjectAltName, or dial a name that it has"
        return f"its certificate is refused ({error.verify_message}); issue it anew"

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        """What identifies the content of the files."""
        return tuple(_identity(path) for path in (self.files.cert, self.files.key, self.files.ca))

    def _read_again(self) -> None:
        try:
            self._context = _context(self.files, self.role)
        except CertificateError as error:
            log.warning("fleet_tls.not_read_again", reason=f"{error}; connections use what was read before")
        else:
            log.info("fleet_tls.read_again", cert=str(self.files.cert))


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _context(files: TlsFiles, role: Role) -> ssl.SSLContext:
    """Raises `CertificateError` also if the certificate would be refused by an end with the same files."""
    own, other = _unchecked(files, role), _unchecked(files, "listener" if role == "dialer" else "dialer")
    other.verify_mode = ssl.CERT_REQUIRED
    try:
        check_secret(files.key, os.stat(files.key).st_mode, "private key")
    except (ValueError, OSError) as error:  # it was readable just now
        raise CertificateError("key", str(error)) from None
    try:
        _meet(own, other, role)
    except ssl.SSLCertVerificationError as error:
        raise CertificateError("cert", f"{files.cert}: {_what_to_change(error, files, role)}") from None
    except ssl.SSLError as error:
        raise CertificateError("cert", f"{files.cert}: {_words(error)}; issue it anew") from None
    own.verify_mode = ssl.CERT_REQUIRED
    own.check_hostname, own.hostname_checks_common_name = role == "dialer", False
    return own


def _unchecked(files: TlsFiles, role: Role) -> ssl.SSLContext:
    """A context that shows the certificate, and accepts any."""
    _check_readable("cert", files.cert)
    _check_readable("key", files.key)
    _check_readable("ca", files.ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "listener" else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if role == "listener":
        context.num_tickets = 0  # no connection is resumed: each checks the certificates
    try:
        # NOTE: without a password argument OpenSSL prompts for one on the terminal and blocks
        context.load_cert_chain(files.cert, files.key, "")
    except (ssl.SSLError, OSError) as error:
        reason = _words(error) if isinstance(error, ssl.SSLError) else error.strerror
        needs = f"both must be PEM, and the key that of the certificate, without a password; the key is {files.key}"
        raise CertificateError("cert", f"{files.cert}: {reason}; {needs}") from None
    try:
        context.load_verify_locations(cafile=files.ca)
    except (ssl.SSLError, OSError) as error:
        reason = _words(error) if isinstance(error, ssl.SSLError) else error.strerror
        raise CertificateError("ca", f"{files.ca}: {reason}; must be certificates of authorities in PEM") from None
    return context


def _check_readable(file: FileRole, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise CertificateError(file, f"{path}: {error.strerror or error}; make it, or name another file") from None


def _meet(own: ssl.SSLContext, other: ssl.SSLContext, role: Role) -> None:
    """Connects two contexts in memory. Raises `ssl.SSLError`, by which the other one refuses the own certificate."""
    to_own, to_other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        own.wrap_bio(to_own, to_other, server_side=role == "listener"),
        other.wrap_bio(to_other, to_own, server_side=role == "dialer"),
    ]
    for _ in range(4):  # flights
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def _what_to_change(error: ssl.SSLCertVerificationError, files: TlsFiles, role: Role) -> str:
    if error.verify_code == HAS_EXPIRED:
        return "the certificate, or one of its authorities, has expired; renew it"
    if error.verify_code == NOT_YET_VALID:
        return "the certificate is not valid yet; set this machine's clock, or issue it anew"
    if error.verify_code in UNKNOWN_ISSUER:
        return f"it is from no authority in {files.ca}; name the file with the authorities of all the fleet"
    if error.verify_code == WRONG_USE:
        use = "serverAuth" if role == "listener" else "clientAuth"
        return f"it must be for {use} (extended key usage); issue it anew"
    return f"it is refused ({error.verify_message}); issue it anew"


def _words(error: ssl.SSLError) -> str:
    """OpenSSL's reason, as in `key values mismatch`."""
    return (error.reason or "no PEM, or locked by a password").replace("_", " ").lower()
