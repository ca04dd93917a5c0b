"""The TLS context of the server's certificate and key, read once at the start."""

from __future__ import annotations

import ssl

from ...stages.errors import ConfigError
from ..config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context of the configured certificate, or None.

    TLS 1.2 or later, with Python's default ciphers. `ConfigError` names the files if one cannot be read, they do
    not match, or the password is wrong.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = config.ssl_keyfile or config.ssl_certfile
    try:
        # NOTE: without a password argument OpenSSL prompts for one on the terminal and blocks
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile = {config.ssl_certfile}, ssl_keyfile = {key}: {_reason(error)}; both must be PEM, the key "
            "must match the certificate, and MILLRACE_SSL_KEYFILE_PASSWORD must hold the key's password, if any"
        ) from None
    except OSError as error:
        raise ConfigError(f"ssl_certfile = {config.ssl_certfile}, ssl_keyfile = {key}: {error.strerror}") from None
    return context


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words, as in `key values mismatch`."""
    return (error.reason or "no PEM, or a wrong password").replace("_", " ").lower()
