"""Encrypted links on loopback: certificates of both ends, what is wrong with them in words, and files that change."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes import tls as tls_module
from millrace.runtime.processes.auth import AuthError, FleetKey, Role
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.tcp import TcpListener, dial
from millrace.runtime.processes.tls import CertificateError, FleetTls, TlsError, TlsFiles
from millrace.runtime.processes.transport import SocketTransport
from tests.runtime.processes.test_dial import dialed
from tests.runtime.processes.test_tcp import CODEC, KEY, OTHER, Core, Note, refused, stranger

YEARS = datetime.timedelta(days=3650)
LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture(scope="module")
def stranger_authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def issue(authority: trustme.CA, folder: Path, name: str = "127.0.0.1", **options: Any) -> TlsFiles:
    """The three files of an end, for one name."""
    folder.mkdir(exist_ok=True)
    files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    issued = authority.issue_cert(name, key_type=trustme.KeyType.ECDSA, **options)
    files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.touch(0o600)
    issued.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


class TlsCore(Core):
    """A listener that answers each word, with or without TLS."""

    def __init__(self, tls: FleetTls | None, key: FleetKey | None = KEY, handshake_s: float = 20.0) -> None:
        super().__init__(key, handshake_s)
        self.listener = TcpListener("127.0.0.1", 0, key, self._connected, handshake_s, tls)


def with_core(test: Callable[[TlsCore], Awaitable[None]], tls: FleetTls | None, **settings: Any) -> TlsCore:
    async def main() -> TlsCore:
        core = TlsCore(tls, **settings)
        await core.listener.start()
        try:
            await test(core)
        finally:
            await core.listener.aclose()
            for link in core.links:
                link.close()
        return core

    return asyncio.run(asyncio.wait_for(main(), 20.0))


async def ask(
    core: TlsCore,
    tls: FleetTls | None,
    text: str = "a",
    key: FleetKey | None = KEY,
    name: str | None = None,
    address: tuple[str, int] | None = None,
) -> str:
    """Dials, sends a word, and returns the answer, or why there is none."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    transport = await dial(*(address or core.listener.address), key, timeout_s=20.0, tls=tls, server_name=name)
    link = Link(transport, CODEC, answer.set_result, answer.set_result, timeout_s=10.0)
    link.start()
    link.post(Note(text))
    found = await answer
    link.close()
    return found.text if isinstance(found, Note) else str(found)


async def refusals(core: TlsCore, count: int) -> None:
    """Waits until the listener has refused so many: the dialer may have ended first."""
    while core.listener.num_refused < count:  # noqa: ASYNC110 - a turn or two
        await asyncio.sleep(0)


def reasons(events: list[dict[str, Any]]) -> list[str]:
    return [str(event["reason"]) for event in events if event["event"] == "link.refused_peer"]


@pytest.mark.parametrize(("key", "num_chars"), [(KEY, 0), (None, 16_385), (KEY, 1 << 20)])
def test_ends_of_one_authority_talk_and_nothing_is_readable(authority, tmp_path, key, num_chars) -> None:
    files = issue(authority, tmp_path)
    text, recorded = "secret " * (num_chars // 7) + "x" * (num_chars % 7), bytearray()

    async def test(core: TlsCore) -> None:
        loop = asyncio.get_running_loop()

        async def copy(source: socket.socket, target: socket.socket) -> None:
            while data := await loop.sock_recv(source, 1 << 16):
                recorded.extend(data)
                await loop.sock_sendall(target, data)
            target.shutdown(socket.SHUT_WR)

        async def relay() -> None:
            near, _ = await loop.sock_accept(server)
            far = await stranger(core)
            await asyncio.gather(copy(near, far), copy(far, near))
            near.close()
            far.close()

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            relaying = asyncio.ensure_future(relay())
            found = await ask(core, FleetTls(files, "dialer"), text, key, address=server.getsockname())
            assert found == text + "!"
            await relaying

    core = with_core(test, FleetTls(files, "listener"), key=key)
    assert core.listener.num_refused == 0
    assert b"secret" not in recorded and b"text" not in recorded
    assert len(recorded) > 2 * num_chars


def test_bytes_arrive_whole_and_in_order_through_full_sockets(authority, tmp_path) -> None:
    files, draw = issue(authority, tmp_path), random.Random(3)
    sent = draw.randbytes(900_001)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[SocketTransport] = loop.create_future()
        listener = TcpListener("127.0.0.1", 0, None, taken.set_result, tls=FleetTls(files, "listener"))
        await listener.start()
        near = await dial(*listener.address, None, tls=FleetTls(files, "dialer"))
        far = await taken
        near.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        rest, piece, got, over, num_waits = memoryview(sent), memoryview(b""), bytearray(), asyncio.Event(), 0

        def write() -> None:
            nonlocal rest, piece, num_waits
            while rest:
                piece = piece or rest[: draw.choice([1, 7, 16_384, 300_000])]
                num_taken = near.send(piece)
                rest, piece = rest[num_taken:], piece[num_taken:]
                if piece:
                    num_waits += 1
                    return

        def read() -> None:
            while data := far.recv():
                got.extend(data)
            if data == b"":
                over.set()

        far.start(read, lambda: None)
        near.start(lambda: None, write)
        write()
        while rest:  # noqa: ASYNC110 - the loop has to turn
            await asyncio.sleep(0)
        near.close()
        await over.wait()
        assert bytes(got) == sent and num_waits > 1
        far.close()
        await listener.aclose()

    asyncio.run(asyncio.wait_for(main(), 20.0))


@pytest.mark.security
def test_a_right_certificate_without_the_fleets_key_is_refused(authority, tmp_path) -> None:
    files = issue(authority, tmp_path)

    async def test(core: TlsCore) -> None:
        with pytest.raises(AuthError):
            await ask(core, FleetTls(files, "dialer"), key=OTHER)
        await refusals(core, 1)

    with captured_logs() as events:
        core = with_core(test, FleetTls(files, "listener"))
    assert core.words == [] and "does not have this fleet's key" in reasons(events)[0]


@pytest.mark.security
@pytest.mark.parametrize("key", [KEY, None])
def test_the_end_of_another_authority_is_refused_on_both_sides_with_the_file(
    authority, stranger_authority, tmp_path, key
) -> None:
    own, other = issue(authority, tmp_path / "own"), issue(stranger_authority, tmp_path / "other")
    both = TlsFiles(other.cert, other.key, tmp_path / "both.pem")
    both.ca.write_bytes(own.ca.read_bytes() + other.ca.read_bytes())

    async def test(core: TlsCore) -> None:
        with pytest.raises(TlsError, match=f"no authority in {other.ca}"):
            await ask(core, FleetTls(other, "dialer"), key=key)
        if key is None:  # the listener's word comes after the dialer's last
            assert f"knows no authority of {both.cert}" in await ask(core, FleetTls(both, "dialer"), key=key)
        else:
            with pytest.raises(TlsError, match=f"it knows no authority of {both.cert}"):
                await ask(core, FleetTls(both, "dialer"))
        await refusals(core, 2)

    with captured_logs() as events:
        core = with_core(test, FleetTls(own, "listener"), key=key)
    assert core.words == [] and core.listener.num_refused == 2
    assert "knows no authority" in reasons(events)[0]


@pytest.mark.security
def test_an_end_whose_certificate_has_expired_is_refused_on_both_sides(authority, tmp_path, monkeypatch) -> None:
    good = issue(authority, tmp_path / "good")
    old = issue(authority, tmp_path / "old", not_before=LONG_AGO, not_after=LONG_AGO + YEARS)
    with pytest.raises(CertificateError, match=f"{old.cert}: the certificate.* has expired; renew it"):
        FleetTls(old, "listener")
    monkeypatch.setattr(tls_module, "_meet", lambda *_: None)  # as if it had expired since the start

    async def at_listener(core: TlsCore) -> None:
        with pytest.raises(TlsError, match="its certificate has expired; renew it there"):
            await ask(core, FleetTls(good, "dialer"))
        await refusals(core, 1)

    async def at_dialer(core: TlsCore) -> None:
        with pytest.raises(TlsError, match=f"it says that {old.cert} has expired"):
            await ask(core, FleetTls(old, "dialer"))
        await refusals(core, 1)

    for test, files, said in ((at_listener, old, "it says that"), (at_dialer, good, "its certificate has expired")):
        with captured_logs() as events:
            with_core(test, FleetTls(files, "listener"))
        assert said in reasons(events)[0]


@pytest.mark.security
def test_a_listener_must_have_the_name_that_is_dialed(authority, tmp_path) -> None:
    files = issue(authority, tmp_path, "engines.example.org")

    async def test(core: TlsCore) -> None:
        dialer = FleetTls(files, "dialer")
        with pytest.raises(TlsError, match=r"not valid for '127\.0\.0\.1'; issue one with this name"):
            await ask(core, dialer)
        with pytest.raises(TlsError, match=r"not valid for 'example\.org'"):
            await ask(core, dialer, name="example.org")
        assert await ask(core, dialer, name="engines.example.org") == "a!"
        await refusals(core, 2)

    assert with_core(test, FleetTls(files, "listener")).listener.num_refused == 2


@pytest.mark.security
def test_an_address_whose_certificate_is_refused_does_not_keep_from_the_next(
    authority, stranger_authority, tmp_path, monkeypatch
) -> None:
    own, other = issue(authority, tmp_path / "own"), issue(stranger_authority, tmp_path / "other")

    async def test(core: TlsCore) -> None:
        wrong = TlsCore(FleetTls(other, "listener"))
        await wrong.listener.start()
        addresses, tls = [wrong.listener.address, core.listener.address], FleetTls(own, "dialer")
        (await dialed(monkeypatch, addresses, tls=tls, server_name="127.0.0.1")).close()
        with pytest.raises(TlsError, match="127.0.0.1: its certificate is from no authority.*; 127.0.0.1: its"):
            await dialed(monkeypatch, addresses[:1] * 2, tls=tls, server_name="127.0.0.1")
        await wrong.listener.aclose()

    with_core(test, FleetTls(own, "listener"))


@pytest.mark.security
def test_a_common_name_is_no_name_of_a_listener(authority, tmp_path) -> None:
    files = issue(authority, tmp_path)
    issued = authority.issue_cert(common_name="engine", key_type=trustme.KeyType.ECDSA)
    files.cert.write_bytes(issued.cert_chain_pems[0].bytes())
    issued.private_key_pem.write_to_path(files.key)

    async def test(core: TlsCore) -> None:
        with pytest.raises(TlsError, match="issue one with this name as subjectAltName"):
            await ask(core, FleetTls(files, "dialer"), name="engine")
        await refusals(core, 1)

    with_core(test, FleetTls(files, "listener"))


@pytest.mark.security
@pytest.mark.parametrize("key", [KEY, None])
def test_ends_with_and_without_tls_say_so(authority, tmp_path, key) -> None:
    files = issue(authority, tmp_path)

    async def plain_dialer(core: TlsCore) -> None:
        if key is None:
            assert "it speaks TLS and this end does not" in await ask(core, None, key=key)
        else:
            with pytest.raises(TlsError, match="it speaks TLS and this end does not"):
                await ask(core, None)
        await refusals(core, 1)

    async def plain_listener(core: TlsCore) -> None:
        with pytest.raises(TlsError, match="it does not speak TLS and this end does"):
            await ask(core, FleetTls(files, "dialer"), key=key)
        await refusals(core, 0 if key is None else 1)

    with captured_logs() as events:
        with_core(plain_dialer, FleetTls(files, "listener"), key=key)
        core = with_core(plain_listener, None, key=key)
    assert core.words == []
    said = ["it does not speak TLS", "it speaks TLS and this end does not"][: 1 if key is None else 2]
    assert len(reasons(events)) == len(said)
    assert all(part in reason for part, reason in zip(said, reasons(events), strict=True))


@pytest.mark.security
def test_an_end_without_a_certificate_or_with_an_old_version_is_refused(authority, tmp_path) -> None:
    files = issue(authority, tmp_path)

    async def test(core: TlsCore) -> None:
        for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = ssl.create_default_context(cafile=files.ca)
            context.maximum_version = version
            try:
                reader, writer = await asyncio.open_connection(*core.listener.address, ssl=context)
                writer.write(bytes(64))
                assert await reader.read() == b""
            except ssl.SSLError:
                pass
        await refusals(core, 2)

    with captured_logs() as events:
        core = with_core(test, FleetTls(files, "listener"))
    assert core.listener.num_refused == 2 and not core.links
    assert reasons(events) == ["it shows no certificate; start it with one"]


@pytest.mark.security
@pytest.mark.parametrize(
    "sent",
    [b"", b"\x16", b"\x16\x03\x01\xff\xff", bytes(10_000), b"\x16\x03\x01" * 9_999],
    ids=["nothing", "a byte", "a head", "zeros", "heads"],
)
def test_a_stranger_at_a_tls_port_gets_an_alert_at_most_and_the_end(authority, tmp_path, sent) -> None:
    async def test(core: TlsCore) -> None:
        raw = await stranger(core)
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        assert len(await refused(raw)) <= 7

    core = with_core(test, FleetTls(issue(authority, tmp_path), "listener"))
    assert core.listener.num_refused == 1 and not core.links


@pytest.mark.security
def test_a_stranger_that_never_finishes_tls_is_ended_in_time(authority, tmp_path) -> None:
    async def test(core: TlsCore) -> None:
        raw = await stranger(core)
        raw.send(b"\x16\x03")
        assert await refused(raw) == b""

    files = issue(authority, tmp_path)
    assert with_core(test, FleetTls(files, "listener"), handshake_s=0.1).listener.num_refused == 1


def test_replaced_files_are_used_by_the_next_connection_and_others_stay(
    authority, stranger_authority, tmp_path
) -> None:
    files = issue(authority, tmp_path / "a")
    renewed = issue(stranger_authority, tmp_path / "b")

    async def test(core: TlsCore) -> None:
        dialer = FleetTls(files, "dialer")
        answers: asyncio.Queue[Any] = asyncio.Queue()
        link = Link(await dial(*core.listener.address, KEY, tls=dialer), CODEC, answers.put_nowait, print)
        link.start()
        os.replace(renewed.cert, files.cert)
        assert await ask(core, dialer) == "a!", "a certificate without its key is not used"
        os.replace(renewed.key, files.key)
        assert await ask(core, dialer) == "a!", "nor is one of an unknown authority"
        os.replace(renewed.ca, files.ca)
        assert await ask(core, dialer) == "a!"
        old = issue(authority, tmp_path / "c")
        with pytest.raises(TlsError, match="no authority"):
            await ask(core, FleetTls(old, "dialer"))
        files.key.unlink()
        assert await ask(core, dialer) == "a!"
        link.post(Note("still"))
        assert (await answers.get()).text == "still!"
        link.close()

    with captured_logs() as events:
        with_core(test, FleetTls(files, "listener"))
    told = [event["event"].removeprefix("fleet_tls.") for event in events if "fleet_tls" in event["event"]]
    assert told == ["not_read_again"] * 4 + ["read_again"] * 2 + ["not_read_again"] * 2  # of each end
    refusals = [str(event["reason"]) for event in events if event["event"] == "fleet_tls.not_read_again"]
    assert "key values mismatch" in refusals[0] and "no authority in" in refusals[2]
    assert f"{files.key}: No such file or directory" in refusals[4]


def _spoil(files: TlsFiles, how: str, other: TlsFiles) -> TlsFiles:
    match how:
        case "none":
            files.cert.unlink()
        case "text":
            files.cert.write_text("hello")
        case "open key":
            files.key.chmod(0o660)
        case "key":
            return TlsFiles(files.cert, other.key, files.ca)
        case "no ca":
            files.ca.write_text("")
        case "ca":
            return TlsFiles(files.cert, files.key, other.ca)
    return files


@pytest.mark.parametrize("role", ["listener", "dialer"])
@pytest.mark.parametrize(
    ("how", "file", "said"),
    [
        ("none", "cert", "No such file or directory; make it"),
        ("text", "cert", "must be PEM"),
        ("open key", "key", r"others can write to this private key \(mode 660\); try `chmod 600"),
        ("key", "cert", "key values mismatch; both must be PEM, and the key that of the certificate"),
        ("no ca", "ca", "must be certificates of authorities in PEM"),
        ("ca", "cert", "it is from no authority in"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_at_the_start(
    authority, stranger_authority, tmp_path, role: Role, how, file, said
) -> None:
    files = _spoil(issue(authority, tmp_path / "a"), how, issue(stranger_authority, tmp_path / "b"))
    with pytest.raises(CertificateError, match=said) as caught:
        FleetTls(files, role)
    assert caught.value.file == file and str(caught.value).startswith(str(getattr(files, file)))


def test_a_private_key_that_others_can_read_is_logged_once(authority, tmp_path) -> None:
    files = issue(authority, tmp_path)
    with captured_logs() as events:
        for mode in (0o600, 0o440, 0o644):
            files.key.chmod(mode)
            FleetTls(files, "dialer")
    told = [(event["event"], event["path"], event["mode"]) for event in events]
    assert told == [("link.key_readable", str(files.key), "644")]
