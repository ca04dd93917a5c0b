"""Messages as bytes: they come back as they were, and nothing else comes back at all."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.runtime.message import Moment, message
from millrace.runtime.processes.wire import Codec, WireError, field_names, moment_places
from millrace.stages.messages import StepTokens
from millrace.stages.split.protocol import CODEC as SPLIT_CODEC


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    limit: int = 1
    names: frozenset[str] = frozenset()


@message
class Outer:
    value: Any
    inner: Inner = field(default_factory=Inner)
    more: Mapping[Any, Any] = field(default_factory=dict)


CODEC = Codec([Outer, Inner, Colour])


def there_and_back(value: Any) -> Any:
    header, body = CODEC.encode(Outer(value))
    return CODEC.decode(header, b"".join(body)).value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.integers(0, 9) | st.text("ab"), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert there_and_back(value) == value


@pytest.mark.parametrize("dtype", ["i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "f8", "f4", "f2", "?"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 3), (4, 0)])
def test_arrays_come_back_with_dtype_shape_and_an_aligned_place(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    pair = there_and_back((array, array.T))
    for one, was in zip(pair, (array, array.T), strict=True):
        assert one.dtype == was.dtype and one.shape == was.shape and (one == was).all()
        assert one.flags.aligned


def test_nested_messages_enums_sets_and_numbers_that_are_none_come_back() -> None:
    header, body = CODEC.encode(
        Outer((Colour.RED, math.inf, np.int64(3)), Inner(limit=2, names=frozenset("ba")), {7: -math.inf})
    )
    back = CODEC.decode(header, b"".join(body))
    assert back.value == (Colour.RED, math.inf, 3) and back.more == {7: -math.inf}
    assert back.inner == Inner(limit=2, names=frozenset("ab"))
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", np.array(["a"]), {1: {2: object()}}])
def test_a_value_that_cannot_be_encoded_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(WireError, match="cannot be encoded"):
        CODEC.encode(Outer(value))


@pytest.mark.security
@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"", b""),
        (b"\x80\x04\x95", b""),  # a pickle begins like this
        (orjson.dumps([16, 1]), b""),  # too few fields
        (orjson.dumps([99, 1]), b""),  # a type that is not listed
        (orjson.dumps([-1]), b""),
        (orjson.dumps([]), b""),
        (orjson.dumps({"a": 1}), b""),
        (orjson.dumps([16, [4, 0, 1], [17, 1, [3]], [2]]), b"1234"),  # an array longer than its bytes
        (orjson.dumps([16, [4, 0, -1], [17, 1, [3]], [2]]), b""),
        (orjson.dumps([16, [4, 77, 1], [17, 1, [3]], [2]]), b"12345678"),  # no such dtype
        (orjson.dumps([16, [4, 0, 2**62], [17, 1, [3]], [2]]), b"12345678"),
        (orjson.dumps([16, 1, [17, 1, [3]], [2]]), b"12345678"),  # bytes that belong to no array
        (orjson.dumps([16, [4, 0, 0, *[2**62] * 40], [17, 1, [3]], [2]]), b""),  # of too many dimensions
        (orjson.dumps([18, "green"]), b""),
        (orjson.dumps([2, [2], 1]), b""),  # a mapping as a key
    ],
)
def test_what_is_no_message_is_refused_by_the_receiver(header: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        CODEC.decode(header, body)


def test_a_type_that_is_no_dataclass_cannot_be_listed() -> None:
    with pytest.raises(TypeError, match="dict: a type to encode"):
        Codec([dict])


def test_two_types_of_one_name_cannot_be_listed() -> None:
    with pytest.raises(TypeError, match="same name"):
        Codec([Inner, Outer, Inner])


@message
class Shadowing:
    """Its fields have the names that the decoder's own code uses."""

    kind: str
    unpack: Sequence[Any]
    tree: int
    type: float
    refuse: str | None = None


def test_fields_may_have_any_name_and_their_number_is_checked() -> None:
    codec = Codec([Shadowing, Outer, Inner])
    back = codec.decode(*codec.encode(Shadowing("a", (1, [2.5], None), 3, math.inf))[:1], b"")
    assert (back.kind, back.unpack, back.tree, back.type, back.refuse) == ("a", (1, [2.5], None), 3, math.inf, None)
    for values in (["a", [1], 3, 1.0], ["a", [1], 3, 1.0, None, 0]):
        with pytest.raises(WireError, match="a Shadowing with a wrong number of fields"):
            codec.decode(orjson.dumps([16, *values]), b"")


@message
class Timed:
    seen_s: Moment
    took_s: float = 0.0
    ended_s: Moment | None = None


def test_moments_are_shifted_where_they_arrive_and_nothing_else_is() -> None:
    codec = Codec([Outer, Timed, Inner])
    sent = Outer((Timed(5.0, 7.0), [Timed(-math.inf, ended_s=0.5)], 9.0))
    back = codec.shifted(-3600.0).decode(*codec.encode(sent)[:1], b"").value
    assert (back[0].seen_s, back[0].took_s, back[0].ended_s, back[2]) == (-3595.0, 7.0, None, 9.0)
    assert (back[1][0].seen_s, back[1][0].ended_s) == (-math.inf, -3599.5)
    with pytest.raises(WireError, match="not a message"):
        codec.shifted(1.0).decode(orjson.dumps([17, "soon", 1, None]), b"")


def test_what_the_processes_of_split_mode_send_has_moments_where_it_has_points_in_time() -> None:
    shifted = SPLIT_CODEC.shifted(100.0)
    ids = np.zeros(0, np.int64)
    step = StepTokens(1, ids, ids, ids, ids, np.zeros(0, np.int8), began_s=3.0, grammar_us=2)
    header, body = SPLIT_CODEC.encode(step)
    assert shifted.decode(header, b"".join(body)).began_s == 103.0
    named = {kind: moment_places(kind, field_names(kind)) for kind in SPLIT_CODEC.types}
    found = {f"{kind.__name__}.{field_names(kind)[place]}" for kind, places in named.items() for place in places}
    assert found == {
        "TokenRequest.arrival_s", "StepTokens.began_s", "Begun.began_s", "ChannelStatus.waiting_since",
        "StageStatus.last_progress_s", "StageStatus.busy_since_s", "StageStatus.blocked_since_s",
    }  # fmt: skip
