"""The proof of the fleet's key: both ends have it or neither gets on, and nothing recorded serves again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes.auth import HANDSHAKE_BYTES, AuthError, FleetKey, Handshake, hkdf
from tests.counts import count, first_seed

KEY, OTHER = FleetKey(bytes(range(32))).derive("link"), FleetKey(bytes(range(1, 33))).derive("link")


def meet(dialer: Handshake, listener: Handshake, size: int = 64) -> None:
    """Passes the bytes of both ends to each other, in pieces of at most `size`."""
    to_listener, to_dialer = bytearray(dialer.nonce), bytearray(listener.nonce)
    while to_listener or to_dialer:
        for handshake, inbox, outbox in ((listener, to_listener, to_dialer), (dialer, to_dialer, to_listener)):
            piece = bytes(inbox[: min(size, handshake.num_wanted)])
            del inbox[: len(piece)]
            outbox += handshake.feed(piece)


@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 64])
def test_two_ends_with_the_key_prove_it_in_64_bytes_each(size: int) -> None:
    dialer, listener = Handshake(KEY, "dialer"), Handshake(KEY, "listener")
    meet(dialer, listener, size)
    assert dialer.is_done and listener.is_done and not dialer.num_wanted and not listener.num_wanted


@pytest.mark.security
def test_a_dialer_without_the_key_gets_a_nonce_and_no_proof() -> None:
    listener = Handshake(KEY, "listener")
    dialer = Handshake(OTHER, "dialer")
    assert listener.feed(dialer.nonce) == b""
    with pytest.raises(AuthError, match="the dialer does not have this fleet's key"):
        listener.feed(dialer.feed(listener.nonce))
    assert not listener.is_done


@pytest.mark.security
def test_a_listener_without_the_key_is_left() -> None:
    dialer, listener = Handshake(KEY, "dialer"), Handshake(OTHER, "listener")
    dialer.feed(listener.nonce)
    with pytest.raises(AuthError, match="the listener does not have"):
        dialer.feed(bytes(32))


@pytest.mark.security
def test_what_was_recorded_of_one_connection_proves_nothing_in_another() -> None:
    dialer, listener = Handshake(KEY, "dialer"), Handshake(KEY, "listener")
    recorded = dialer.nonce + dialer.feed(listener.nonce)
    listener.feed(recorded)
    assert listener.is_done and len(recorded) == HANDSHAKE_BYTES
    with pytest.raises(AuthError):
        Handshake(KEY, "listener").feed(recorded)


@pytest.mark.security
def test_an_ends_own_proof_does_not_serve_as_the_others() -> None:
    dialer = Handshake(KEY, "dialer", nonce=bytes(32))
    own = dialer.feed(bytes(32))
    with pytest.raises(AuthError):
        dialer.feed(own)
    first, second = Handshake(KEY, "listener", nonce=bytes(32)), Handshake(KEY, "dialer", nonce=bytes(32))
    proof_of_dialer = second.feed(bytes(32))
    assert first.feed(bytes(32) + proof_of_dialer) != proof_of_dialer


@pytest.mark.security
def test_mutated_handshakes_prove_nothing() -> None:
    draw = random.Random(first_seed())
    for _ in range(count(2_000, 100_000)):
        dialer, listener = Handshake(KEY, "dialer", draw.randbytes(32)), Handshake(KEY, "listener", draw.randbytes(32))
        right = dialer.nonce + dialer.feed(listener.nonce)
        sent = bytearray(right)
        match draw.randrange(3):
            case 0:
                sent[draw.randrange(len(sent))] ^= 1 << draw.randrange(8)
            case 1:
                del sent[draw.randrange(len(sent))]
                sent += draw.randbytes(draw.randrange(3))
            case 2:
                sent[draw.randrange(len(sent)) :] = draw.randbytes(draw.randrange(200))
        if sent.startswith(right):
            continue  # a byte was drawn that had been there
        try:
            while sent and not listener.is_done:
                piece = bytes(sent[: draw.randrange(1, 80)])
                del sent[: len(piece)]
                listener.feed(piece)
        except AuthError:
            pass
        assert not listener.is_done


def test_keys_are_derived_as_rfc_5869_has_it() -> None:
    """Its test cases 1 and 3."""
    assert hkdf(bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert hkdf(bytes([11] * 22), b"", b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )
    assert len({FleetKey(bytes(32)).derive(purpose) for purpose in ("link", "prefix", "kv")}) == 3


def test_a_key_file_of_too_few_bytes_is_refused_by_its_name_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    path.write_bytes(b"secret-secret-secret-secret-123")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"fleet\.key: a fleet key of 31 bytes: must have 32 to 65536; try") as refused:
        FleetKey.read(path)
    assert "secret-secret" not in str(refused.value)
    path.write_bytes(b"secret-secret-secret-secret-123\n")
    assert "secret" not in repr(FleetKey.read(path)) and FleetKey.read(path).derive("link") != KEY
    path.write_bytes(bytes(1 << 17))
    with pytest.raises(ValueError, match="of 65537 bytes"):
        FleetKey.read(path)


def test_a_key_file_that_others_can_write_is_refused_and_one_that_they_can_read_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    path.write_bytes(bytes(32))
    with captured_logs() as events:
        for mode in (0o600, 0o440, 0o644):
            path.chmod(mode)
            FleetKey.read(path)
    assert [(event["event"], event["mode"]) for event in events] == [("link.key_readable", "644")]
    for mode in (0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"others can write to this fleet key \(mode {mode:o}\); try `chmod 600"):
            FleetKey.read(path)
