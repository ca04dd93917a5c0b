"""What names the engines of a front: an address, a name in DNS, or a file of addresses."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError

DNS_PERIOD_S = 5.0  # between two looks at a name
FILE_PERIOD_S = 0.5
MAX_FILE_BYTES = 1 << 16

Address = tuple[str, int]  # host and port
ParseAddress = Callable[[str], Address]  # raises `ConfigError`


class SourceError(Exception):
    """A source cannot be read now. What it named before stays."""


class EngineSource(Protocol):
    """Names engines."""

    @property
    def text(self) -> str:
        """The source, as it was given."""

    @property
    def period_s(self) -> float | None:
        """Between two looks; None: it always names the same."""

    async def look(self) -> Sequence[Address]:
        """The addresses that it names now. Raises `SourceError`."""


class FixedAddress:
    """One address; see `EngineSource`."""

    period_s = None

    def __init__(self, text: str, address: Address) -> None:
        self.text, self._address = text, address

    async def look(self) -> Sequence[Address]:
        return (self._address,)


class DnsName:
    """All addresses of a name, of both families; see `EngineSource`."""

    def __init__(self, text: str, name: str, port: int, period_s: float = DNS_PERIOD_S) -> None:
        self.text, self.period_s = text, period_s
        self.name, self._port = name, port
        self._found: Sequence[Address] = ()

    def has_named(self, address: Address) -> bool:
        """Whether the address is one of those of the last look."""
        return address in self._found

    async def look(self) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from None
        self._found = sorted({(str(address[0]), self._port) for *_, address in found})
        return self._found


def certified_name(sources: Sequence[EngineSource], address: Address) -> str:
    """The name in the certificate of an engine: the one in DNS that led to its address, else the address's host."""
    names = (source.name for source in sources if isinstance(source, DnsName) and source.has_named(address))
    return next(names, address[0])


class AddressFile:
    """The addresses in a file, one a line; empty lines and those that begin with # say nothing. See `EngineSource`.

    The file may be replaced at any time, by a rename: a file that is read while it is written may lack engines.
    """

    def __init__(self, text: str, path: Path, parse: ParseAddress, period_s: float = FILE_PERIOD_S) -> None:
        self.text, self.period_s = text, period_s
        self._path, self._parse = path, parse
        self._seen: tuple[int, ...] | None = None  # what identifies the last content
        self._found: Sequence[Address] = ()

    async def look(self) -> Sequence[Address]:
        try:
            stat = os.stat(self._path)
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if seen != self._seen:
                self._found, self._seen = self._read(), seen
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from None
        return self._found

    def _read(self) -> Sequence[Address]:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise SourceError(f"it is longer than {MAX_FILE_BYTES} bytes")
        found: list[Address] = []
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            if (address := line.strip()) and not address.startswith("#"):
                try:
                    found.append(self._parse(address))
                except ConfigError as error:
                    raise SourceError(f"line {number}: {error}") from None
        return found
