"""Two versions of the program: they exchange what both know, and name what one of them does not."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, make_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runtime.message import Moment, message
from millrace.runtime.processes.type_fields import PeerCodec, codec_for, describe
from millrace.runtime.processes.wire import Codec, WireError
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.split.protocol import CODEC
from tests.counts import count


def typed(name: str, *fields: str, kw_only: bool = False) -> type:
    """A dataclass of these fields; `a=` has a default."""
    specs: list[Any] = [
        (text.rstrip("="), Any, field(default=None)) if text.endswith("=") else (text, Any) for text in fields
    ]
    return make_dataclass(name, specs, frozen=True, kw_only=kw_only)


def crossing(sender: Codec, receiver: Codec, value: Any) -> Any:
    """The value as it arrives at an end of another version."""
    header, body = codec_for(sender, describe(receiver)).encode(value)
    return codec_for(receiver, describe(sender)).decode(header, b"".join(body))


def test_ends_of_one_version_use_the_codec_as_it_is() -> None:
    assert codec_for(CODEC, describe(CODEC)) is CODEC


def test_a_field_that_was_added_is_left_out_for_an_old_end_and_filled_from_an_old_end() -> None:
    old, new = typed("Word", "a", "b="), typed("Word", "a", "b=", "c=")
    there = crossing(Codec([new]), Codec([old]), new(1, 2))
    assert there == old(1, 2)
    back = crossing(Codec([old]), Codec([new]), old(1, 2))
    assert back == new(1, 2, None)


def test_a_field_that_was_removed_is_left_out_for_a_new_end_and_filled_from_it() -> None:
    old, new = typed("Word", "a=", "gone=", "b="), typed("Word", "b=", "a=")
    assert crossing(Codec([old]), Codec([new]), old(1, None, 2)) == new(2, 1)
    assert crossing(Codec([new]), Codec([old]), new(2, 1)) == old(1, None, 2)


def test_a_field_that_is_set_and_not_known_refuses_the_message_by_name() -> None:
    old, new = typed("Word", "a"), typed("Word", "a", "c=")
    with pytest.raises(WireError, match="Word cannot be sent: .* does not know its field c, which is set to 7"):
        crossing(Codec([new]), Codec([old]), new(1, 7))
    with pytest.raises(WireError, match="its field c, which is set to a str$"):
        crossing(Codec([new]), Codec([old]), new(1, "text of a user"))
    with pytest.raises(WireError, match="its field c"):
        crossing(Codec([new]), Codec([old]), [new(1), {"deep": (new(1, np.zeros(2)),)}])


def test_an_end_that_only_reports_leaves_out_what_is_set_and_not_known() -> None:
    old, new = typed("Word", "a"), typed("Word", "a", "needed", "c=")
    codec = codec_for(Codec([new]), describe(Codec([old])), only_reports=True)
    assert codec_for(Codec([old]), describe(Codec([new]))).decode(codec.encode(new(1, 7, 8))[0], b"") == old(1)
    lacking = codec_for(Codec([old]), describe(Codec([new])), only_reports=True)
    with pytest.raises(WireError, match="needs its field needed, which this one lacks"):
        lacking.encode(old(1))


def test_a_field_without_default_refuses_the_message_at_both_ends() -> None:
    old, new = typed("Word", "a"), typed("Word", "a", "c")
    with pytest.raises(WireError, match="needs its field c, which this one lacks"):
        crossing(Codec([old]), Codec([new]), old(1))
    with pytest.raises(WireError, match="does not know its field c"):
        crossing(Codec([new]), Codec([old]), new(1, None))
    decoder = codec_for(Codec([new]), describe(Codec([old])))
    with pytest.raises(WireError, match="a Word came without the field c"):
        decoder.decode(b"[16,1]", b"")


def test_a_type_that_one_end_lacks_is_never_sent_and_moves_no_other_types_tag() -> None:
    more, word = typed("More", "x"), typed("Word", "a")
    old, new = Codec([word]), Codec([more, word])
    assert crossing(new, old, word(1)) == word(1) == crossing(old, new, word(1))
    with pytest.raises(WireError, match="More cannot be sent: the other end's version does not know it"):
        crossing(new, old, word(more(1)))
    with pytest.raises(WireError, match="a More came, which this version does not know"):
        codec_for(old, describe(new)).decode(b"[16,1]", b"")


def test_defaults_are_compared_as_they_would_be_sent() -> None:
    @message
    class Part:
        numbers: Any = ()

    @dataclass(frozen=True, kw_only=True)
    class Word:
        a: int = 0
        part: Part = field(default_factory=Part)
        array: Any = field(default_factory=lambda: np.zeros(2))

    old, new = Codec([typed("Word", "a=", kw_only=True)]), Codec([Word, Part])
    assert crossing(new, old, Word(a=3)).a == 3
    with pytest.raises(WireError, match="field part, which is set to a Part"):
        crossing(new, old, Word(part=Part((1,))))
    with pytest.raises(WireError, match="field array, which is set to a ndarray"):
        crossing(new, old, Word(array=np.ones(2)))
    with pytest.raises(WireError, match="field array"):
        crossing(new, old, Word(array=np.zeros(2, np.int32)))
    assert crossing(old, new, old.types[0](a=4)).array.tolist() == [0, 0]


def test_a_default_in_another_form_counts_as_the_default() -> None:
    @message
    class Part:
        ratio: float = 0.0

    @dataclass(frozen=True)
    class Word:
        a: int = 0
        penalty: float = 0.0
        steps: Any = ()
        limits: Any = field(default_factory=dict)
        part: Part = field(default_factory=Part)
        unknown: float = float("nan")

    old, new = Codec([typed("Word", "a=")]), Codec([Word, Part])
    sent = Word(1, np.float32(0), [], MappingProxyType({}), Part(0), float("nan"))
    assert crossing(new, old, sent).a == 1
    for other in (Word(penalty=1), Word(steps=[0]), Word(limits={0: 0}), Word(part=Part(1)), Word(unknown=0.0)):
        with pytest.raises(WireError, match="does not know its field"):
            crossing(new, old, other)


def test_a_value_of_an_enum_that_one_end_lacks_refuses_the_message() -> None:
    old, new = enum.Enum("Hue", {"RED": "red"}), enum.Enum("Hue", {"RED": "red", "BLUE": "blue"})
    word = typed("Word", "a")
    here, there = Codec([word, new]), Codec([word, old])
    assert crossing(here, there, word(new.RED)) == word(old.RED)
    with pytest.raises(WireError, match=r"Hue\.BLUE cannot be sent"):
        crossing(here, there, word(new.BLUE))


def test_moments_are_shifted_by_their_name_not_by_their_place() -> None:
    @message
    class Word:
        a: int = 0
        began_s: Moment = 0.0

    old, new = Codec([typed("Word", "began_s=", "a=")]), Codec([Word])
    decoder = codec_for(new, describe(old)).shifted(10.0)
    back = decoder.decode(codec_for(old, describe(new)).encode(old.types[0](2.0, 1))[0], b"")
    assert (back.a, back.began_s) == (1, 12.0)


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3)),
    st.booleans(),
)
@settings(max_examples=count(50, 3_000))
def test_ends_with_any_two_sets_of_fields_agree_or_refuse(
    here: list[str], there: list[str], optional: set[str], optional_there: set[str], values: dict[str, int], kw: bool
) -> None:
    def made(names: list[str], with_default: set[str]) -> type:
        fields = sorted((name + "=" * (name in with_default) for name in names), key=lambda name: name.endswith("="))
        return typed("Word", *fields, kw_only=kw)

    ours, theirs = made(here, optional), made(there, optional_there)
    given_values = {name: values.get(name, 0) for name in here if name in values or name not in optional}
    sent = ours(**given_values)
    is_known = set(given_values) <= set(there) and all(name in here for name in set(there) - optional_there)
    is_known = is_known and all(name in there for name in set(here) - optional)
    if is_known:
        came = crossing(Codec([ours]), Codec([theirs]), sent)
        assert {name: getattr(came, name) for name in there} == {
            name: getattr(sent, name) if name in here else None for name in there
        }
    else:
        with pytest.raises(WireError, match="Word cannot be sent"):
            crossing(Codec([ours]), Codec([theirs]), sent)


def test_requests_cross_to_a_split_engine_that_lacks_a_parameter_unless_they_use_it() -> None:
    old = describe(CODEC)
    params = next(each for each in old if each[0] == "SamplingParams")
    params[1].remove("min_p")
    there = codec_for(CODEC, old)
    assert isinstance(there, PeerCodec)
    ids = np.arange(3, dtype=np.int32)
    there.encode(TokenRequest("a", 0, ids, SamplingParams(max_tokens=3, seed=1), 0))
    with pytest.raises(WireError, match=r"SamplingParams cannot be sent: .* field min_p, which is set to 0\.25"):
        there.encode(TokenRequest("a", 0, ids, SamplingParams(max_tokens=3, seed=1, min_p=0.25), 0))


@pytest.mark.security
@pytest.mark.parametrize(
    "described",
    [
        None,
        7,
        {"Word": ["a"]},
        [["Word"]],
        [["Word", "a", "b"]],
        [["Word", [1], []]],
        [["Word", ["a"] * 2000, []]],
        [["Hue", [[]]]],
        [[["Word"], ["a"], []]],
        [["Word", ["a"], []]] * 2000,
    ],
)
def test_what_describes_no_types_is_refused(described: Any) -> None:
    with pytest.raises(WireError):
        codec_for(Codec([typed("Word", "a")]), described)
