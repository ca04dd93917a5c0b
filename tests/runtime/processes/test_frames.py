"""Frames without a socket: whatever way bytes are cut, the same frames come out, and no bytes do harm."""

from __future__ import annotations

import random
import sys
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.runtime.processes.frames import (
    FRAME,
    ITEM,
    MAGIC,
    WORD,
    Frame,
    FrameReader,
    LinkError,
    pack_frame,
)
from millrace.runtime.processes.wire import WireError
from tests.counts import count, first_seed

FRAMES = st.lists(
    st.tuples(
        st.integers(0, 255),
        st.integers(0, 255),
        st.binary(max_size=40),
        st.lists(st.binary(max_size=40), max_size=3),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)


def taken(frames: FrameReader) -> list[Frame]:
    found = []
    while (frame := frames.next()) is not None:
        found.append(frame)
    return found


@given(FRAMES, st.lists(st.integers(0, 400)))
def test_frames_come_out_as_they_were_packed_wherever_the_bytes_are_cut(
    sent: list[tuple[int, int, bytes, list[bytes], int]], cuts: list[int]
) -> None:
    raw = b"".join(b"".join(pack_frame(*frame)) for frame in sent)
    frames, found = FrameReader(), []
    for begin, end in pairwise(sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})):
        frames.feed(raw[begin:end])
        found += taken(frames)
    assert not len(frames)
    assert [(kind, edge, bytes(body), num) for kind, edge, _, body, num in found] == [
        (kind, edge, b"".join(body), num) for kind, edge, _, body, num in sent
    ]
    for (_, _, header, _, _), (_, _, was, _, _) in zip(found, sent, strict=True):
        assert bytes(header) == was + b" " * (-len(was) % 8)


def test_a_large_frame_is_freed_once_taken_though_part_of_the_next_has_come() -> None:
    frames = FrameReader()
    raw = b"".join(pack_frame(ITEM, 0, b"", [bytes(1 << 20)]))
    for begin in range(0, len(raw), 1 << 18):
        assert not taken(frames)
        frames.feed((raw + raw[:1])[begin : begin + (1 << 18)])
    tracemalloc.start()
    found = taken(frames)
    assert tracemalloc.get_traced_memory()[1] < 1.5 * len(raw), "one copy"
    tracemalloc.stop()
    assert len(found) == 1 and len(frames) == 1 and sys.getsizeof(frames._received) < 1000
    frames.feed(raw[1:])
    assert len(taken(frames)) == 1 and not len(frames)


def test_a_frame_keeps_its_bytes_when_more_arrive() -> None:
    frames = FrameReader()
    raw = b"".join(pack_frame(ITEM, 0, b"", [b"a" * 8]))
    frames.feed(raw[:20])
    assert frames.next() is None and len(frames) == 20
    frames.feed(raw[20:] + raw[:5])
    first = frames.next()
    frames.feed(raw[5:])
    second = frames.next()
    assert first is not None and second is not None and first[3] == second[3] == b"a" * 8 and not len(frames)


def test_a_frame_of_the_limit_passes_and_a_larger_one_does_not() -> None:
    exact = b"".join(pack_frame(WORD, 0, b"h" * 8, [b"b" * 24], max_frame_bytes=32))
    frames = FrameReader(max_frame_bytes=32)
    frames.feed(exact)
    assert len(taken(frames)) == 1
    with pytest.raises(WireError, match="a message of 40 bytes cannot be sent: at most 32"):
        pack_frame(WORD, 0, b"h" * 8, [b"b" * 32], max_frame_bytes=32)
    frames.feed(FRAME.pack(MAGIC, WORD, 0, 2**32 - 1, 2**32 - 1, 0))
    with pytest.raises(LinkError, match="a frame of 8589934590 bytes: at most 32"):
        frames.next()


@pytest.mark.security
def test_mutated_frames_are_frames_or_errors_and_are_never_kept_beyond_the_limit() -> None:
    draw, limit = random.Random(first_seed()), 256
    for _ in range(count(3_000, 100_000)):
        raw = bytearray()
        for _ in range(draw.randrange(1, 4)):
            body = [draw.randbytes(8 * draw.randrange(8))]
            raw += b"".join(pack_frame(draw.randrange(8), draw.randrange(3), draw.randbytes(draw.randrange(30)), body))
        for _ in range(draw.randrange(1, 4)):
            match draw.randrange(3):
                case 0:
                    raw[draw.randrange(len(raw))] = draw.randrange(256)
                case 1:
                    del raw[draw.randrange(len(raw)) :][: draw.randrange(20)]
                case 2:
                    at = draw.randrange(len(raw))
                    raw[at:at] = draw.randbytes(draw.randrange(20))
            raw = raw or bytearray(b"\0")
        frames, at = FrameReader(limit), 0
        try:
            while at < len(raw):
                size = draw.randrange(1, 60)
                frames.feed(bytes(raw[at : at + size]))
                at += size
                for _, _, header, body, _ in taken(frames):
                    assert len(header) + len(body) <= limit
                assert len(frames) < FRAME.size + limit
        except LinkError:
            pass
