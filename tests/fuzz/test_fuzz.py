"""Each reader takes its corpus, and mutations of it, without another error than it documents."""

from __future__ import annotations

import random

import pytest

from tests.counts import count, first_seed
from tests.fuzz.corpus import CORPUS
from tests.fuzz.targets import TARGETS

pytestmark = [pytest.mark.slow, pytest.mark.security]
NUM_MUTATIONS = count(300, 20_000)


def test_every_target_has_a_corpus() -> None:
    assert set(CORPUS) == set(TARGETS) and all(CORPUS.values())


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_raises_only_what_it_documents(name: str) -> None:
    draw = random.Random(f"{name}/{first_seed()}")
    for data in CORPUS[name]:
        TARGETS[name](data)
    for _ in range(NUM_MUTATIONS):
        data = mutated(draw.choice(CORPUS[name]), draw)
        try:
            TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"{name} of {data!r}") from error


def mutated(data: bytes, draw: random.Random) -> bytes:
    """`data` with one to four changes: bytes changed, left out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        at, length = draw.randrange(len(changed) + 1), draw.randrange(1, 9)
        match draw.randrange(4):
            case 0:
                changed[at : at + 1] = draw.randbytes(1)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length]
            case 3:
                changed[at:at] = draw.choice((b"\x00", b'"', b"{", b"[", b"9" * 20, b"-", b"\xed\xa0\x80", b"null"))
    return bytes(changed)
