"""The server's certificate and key, read once at the start."""

from __future__ import annotations

import ssl

from ...stages.errors import ConfigError
from ..config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What makes HTTPS of HTTP; None without a certificate. TLS 1.2 at least, with Python's choice of ciphers.

    `ConfigError` names the file that can not be read, that does not fit the other, or whose password is wrong.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = config.ssl_keyfile or config.ssl_certfile
    try:
        # with no password at all OpenSSL would ask for one on the terminal, and wait
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile = {config.ssl_certfile}, ssl_keyfile = {key}: {_reason(error)}; both must be PEM, the key "
            "that of the certificate, and its password, if it has one, in MILLRACE_SSL_KEYFILE_PASSWORD"
        ) from None
    except OSError as error:
        raise ConfigError(f"ssl_certfile = {config.ssl_certfile}, ssl_keyfile = {key}: {error.strerror}") from None
    return context


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's word for it: `key values mismatch`."""
    return (error.reason or "no PEM, or a wrong password").replace("_", " ").lower()
