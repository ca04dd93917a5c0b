"""What strangers do to the ports of a fleet's processes, and what these hold meanwhile."""

from __future__ import annotations

import ipaddress
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millrace.runtime.processes.frames import FRAME, MAGIC

Address = tuple[str, int]
LIMIT_S = 300.0  # also on a machine that stands still for a while
AT_ONCE = 16  # fewer than an engine lets wait for their proof
LISTENING = "0A"  # in /proc/net/tcp
ACCEPTS = 1 << 16  # in the flags of /proc/net/unix
PICKLE = b"\x80\x04cos\nsystem\n(S'touch stranger-canary'\ntR."


def family(pid: int) -> list[int]:
    """A process and those below it."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


@dataclass(frozen=True)
class Listening:
    """What a process and those below it listen at: addresses of TCP, and paths of Unix sockets."""

    tcp: set[Address]
    unix: set[str]


def listening_sockets(pid: int) -> Listening:
    """In no abstract socket: such a path would be empty, or begin with @."""
    inodes = set()
    for one in family(pid):
        for link in Path(f"/proc/{one}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tcp, unix = set(), set()
    for table, size in (("tcp", 4), ("tcp6", 16)):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    host, _, port = fields[1].rpartition(":")
                    words = struct.pack(f"={size // 4}I", *struct.unpack(f">{size // 4}I", bytes.fromhex(host)))
                    tcp.add((str(ipaddress.ip_address(words)), int(port, 16)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & ACCEPTS and fields[6] in inodes:
            unix.add(fields[7] if len(fields) > 7 else "")
    return Listening(tcp, unix)


def listening_ports(pid: int) -> set[int]:
    """The ports that a process and those below it listen on, whatever the address."""
    return {port for _, port in listening_sockets(pid).tcp}


def resident_mib(pid: int) -> float:
    """The memory of a process and those below it."""
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def junk(draw: random.Random) -> bytes:
    """Bytes of a kind: random, a frame with a drawn head, a pickle, the start of HTTP, or half a handshake."""
    match draw.randrange(5):
        case 0:
            return draw.randbytes(draw.randrange(1, 400))
        case 1:
            sizes = [draw.choice([0, 8, 1 << 10, 1 << 24, (1 << 32) - 1]) for _ in range(3)]
            return FRAME.pack(MAGIC, draw.randrange(10), draw.randrange(4), *sizes) + draw.randbytes(40)
        case 2:
            return PICKLE * draw.randrange(1, 9)
        case 3:
            return b"GET /" + draw.randbytes(20) + b" HTTP/1.1\r\n\r\n"
    return draw.randbytes(32) + struct.pack("<I", draw.randrange(1 << 32))


def answers_to_junk(address: Address, count: int, seed: int) -> Iterator[bytes]:
    """What each of so many strangers gets for its junk, one connection each, `AT_ONCE` at a time."""

    def ask(data: bytes) -> bytes:
        with socket.create_connection(address, LIMIT_S) as stranger:
            with suppress(OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            return received(stranger)

    draw = random.Random(seed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(ask, [junk(draw) for _ in range(count)])


def received(sock: socket.socket, limit: int = 1 << 20) -> bytes:
    """All that comes until the other end closes."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < limit and (part := sock.recv(1 << 16)):
            data += part
    return data


def closed_after(address: Address, count: int, first: bytes, limit_s: float) -> list[float]:
    """Seconds after which each of `count` connections was closed that sent `first` and then a byte a second."""
    socks = [socket.create_connection(address, LIMIT_S) for _ in range(count)]
    began_s, over = time.monotonic(), dict[socket.socket, float]()
    try:
        for sock in socks:
            sock.sendall(first)
        while len(over) < count and time.monotonic() - began_s < limit_s:
            for sock in socks:
                if sock not in over and _is_closed(sock):
                    over[sock] = time.monotonic() - began_s
            time.sleep(1.0)
    finally:
        for sock in socks:
            sock.close()
    return list(over.values())


def _is_closed(sock: socket.socket) -> bool:
    try:
        sock.send(b"x")
        while select.select([sock], [], [], 0)[0]:
            if not sock.recv(1 << 16):
                return True
    except OSError:
        return True
    return False


@contextmanager
def recorder(target: Address) -> Iterator[tuple[Address, list[bytearray]]]:
    """A relay to `target`, and what its dialers sent, a connection each."""
    sent: list[bytearray] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_record, args=(server, target, sent), daemon=True).start()
        yield server.getsockname(), sent


def _record(server: socket.socket, target: Address, sent: list[bytearray]) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            far, kept = socket.create_connection(target), bytearray()
            sent.append(kept)
            for source, sink, copy in ((near, far, kept), (far, near, None)):
                threading.Thread(target=_copy, args=(source, sink, copy), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if kept is not None:
                kept += data
            sink.sendall(data)
    for sock in (source, sink):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
