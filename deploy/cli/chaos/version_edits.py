"""Makes a link pass as one between adjacent versions: neither end hears of the other's newest fields.

A link's first frames name the types of each end with their fields (`runtime/processes/type_fields.py`). The relay takes
the last field of each type away, if that has a default: an end of the version before would not have it either.
"""

from __future__ import annotations

from typing import Any

import orjson

from ....runtime.processes.auth import HANDSHAKE_BYTES
from ....runtime.processes.frames import HELLO, FrameReader, pack_frame
from .relay import Edit, Way

# without their last fields a front cannot use an engine, and says so
NEEDED = frozenset({"Setup", "EngineReady"})


class HelloEdit:
    """What passes in one direction of a connection: the proof of the key as it is, the first frame without fields."""

    def __init__(self) -> None:
        self._begun = b""
        self._is_over = False

    def __call__(self, data: bytes) -> bytes:
        if self._is_over:
            return data
        self._begun += data
        proof, frames = self._begun[:HANDSHAKE_BYTES], self._begun[HANDSHAKE_BYTES:]
        passed = proof[len(self._begun) - len(data) :]
        reader = FrameReader()
        reader.feed(frames)
        if not frames or (frame := reader.next()) is None:
            return passed
        self._is_over = True
        kind, edge, header, _, _ = frame
        assert kind == HELLO
        rest = frames[len(frames) - len(reader) :]
        return passed + b"".join(pack_frame(HELLO, edge, without_last_fields(bytes(header)))) + rest


def without_last_fields(hello: bytes) -> bytes:
    """A hello whose types lack their last fields, where these have defaults."""
    fields: dict[str, Any] = orjson.loads(hello)
    fields["types"] = [_shortened(one) for one in fields["types"]]
    return orjson.dumps(fields)


def _shortened(described: list[Any]) -> list[Any]:
    match described:
        case [str(name), [*first, str(last)], [*required]] if last not in required and name not in NEEDED:
            return [name, first, required]
    return described


def drop_fields() -> dict[Way, Edit]:
    """The edits of one connection."""
    return {"up": HelloEdit(), "down": HelloEdit()}
