"""The addresses of engines, and the key and certificates of a fleet, as flags name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ....runtime.processes.auth import FleetKey, Role
from ....runtime.processes.tls import CertificateError, FleetTls, TlsFiles
from ....stages.errors import ConfigError
from ....stages.machines.engine_sources import AddressFile, DnsName, EngineSource, FixedAddress

PREFIX_KEY_BYTES = 16
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,127}", re.ASCII)


def parse_address(flag: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPV6]:PORT or :PORT. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not port.isdecimal() or not 0 <= int(port) < 1 << 16 or is_bare:
        raise ConfigError(f"{flag} {text}: must be HOST:PORT, such as 10.0.0.5:7000 or [fd00::5]:7000")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"{flag} {text}: {host!r} is no name of a host: {error.__cause__ or error}") from None
    return host, int(port)


def parse_source(text: str) -> EngineSource:
    """What names engines: HOST:PORT, dns:NAME:PORT or file:PATH. Raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return AddressFile(text, Path(rest), partial(parse_address, "address"))
    if kind == "dns" and rest:
        return DnsName(text, *parse_address("--engine dns:", rest))
    return FixedAddress(text, parse_address("--engine", text))


def engines_by_model(texts: Sequence[str]) -> dict[str, list[str]]:
    """What names engines, by the model that MODEL=ADDRESS says. {}: none says one. Raises `ConfigError`."""
    models: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals or text.startswith(("file:", "dns:")):
            unnamed.append(text)
            continue
        if not MODEL_NAME.fullmatch(name):
            message = "a model's name begins with a letter or digit, and has up to 128 of these and of . _ / : -"
            raise ConfigError(f"--engine {text}: {message}")
        models.setdefault(name, []).append(address)
    if models and unnamed:
        raise ConfigError(f"--engine {unnamed[0]}: names no model, and others do; write MODEL={unnamed[0]}")
    return models


def read_key(path: Path | None) -> FleetKey | None:
    """The key in a file; None without one. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        return FleetKey.read(path)
    except ValueError as error:
        raise ConfigError(f"--fleet-key-file {error}") from None
    except OSError as error:
        raise ConfigError(f"--fleet-key-file {path}: {error.strerror or error}") from None


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """The files of TLS; None without any. Raises `ConfigError` if one is missing beside others."""
    if cert is not None and key is not None and ca is not None:
        return TlsFiles(cert, key, ca)
    given = {"--fleet-tls-cert": cert, "--fleet-tls-key": key, "--fleet-tls-ca": ca}
    missing = [flag for flag, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    raise ConfigError(f"{' and '.join(missing)}: must be set too; both ends of a link show a certificate and check one")


def read_tls(files: TlsFiles | None, role: Role) -> FleetTls | None:
    """What these files say; None without them. Raises `ConfigError`."""
    try:
        return None if files is None else FleetTls(files, role)
    except CertificateError as error:
        raise ConfigError(f"--fleet-tls-{error.file} {error}") from None


def prefix_key(key: FleetKey | None) -> bytes | None:
    """What all engines of a fleet name their blocks by; None without a key."""
    return None if key is None else key.derive("prefix")[:PREFIX_KEY_BYTES]
