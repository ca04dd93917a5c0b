"""Stop strings against a reading of the whole text at once."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.stages.detokenize.stop_strings import StopMatcher


def matcher(*stops: str, includes_stop: bool = False) -> StopMatcher:
    return StopMatcher(stops, includes_stop)


def read(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    """Pushes pieces until the first match: all that went out, and the match."""
    out = ""
    for piece in pieces:
        emitted, match = matcher.push(piece)
        out += emitted
        if match is not None:
            return out, match
    return out + matcher.flush(), None


def oracle(stops: list[str], text: str, includes_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            match = max(complete, key=len)
            return text[: end if includes_stop else end - len(match)], match
    return text, None


letters = st.text("ab", max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(letters, max_size=8),
    st.booleans(),
)
def test_any_cut_of_the_text_gives_what_the_whole_text_gives(stops, pieces, includes_stop):
    expected = oracle(stops, "".join(pieces), includes_stop)
    assert read(matcher(*stops, includes_stop=includes_stop), pieces) == expected
    assert read(matcher(*stops, includes_stop=includes_stop), list("".join(pieces))) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), letters)
def test_nothing_that_went_out_is_ever_the_beginning_of_the_match(stops, text):
    watcher, out = matcher(*stops), ""
    before, match = oracle(stops, text, False)
    for character in text:
        emitted, found = watcher.push(character)
        out += emitted
        assert before.startswith(out)
        if found is not None:
            assert found == match
            return
    assert match is None and out + watcher.flush() == text


def test_only_what_may_begin_a_stop_string_is_held_back():
    watcher = matcher("\nUser:")
    assert watcher.push("Hello") == ("Hello", None)
    assert watcher.push(" you\nUs") == (" you", None)
    assert watcher.push("ed it\n") == ("\nUsed it", None)
    assert watcher.flush() == "\n"


def test_the_match_that_is_complete_first_wins_over_one_that_began_earlier():
    assert read(matcher("abcd", "bc"), ["xa", "bcd"]) == ("xa", "bc")


def test_of_matches_that_end_together_the_longest_wins():
    assert read(matcher("c", "abc"), ["xab", "cd"]) == ("x", "abc")


def test_the_stop_string_itself_goes_out_on_request_and_nothing_after_it():
    assert read(matcher("END", includes_stop=True), ["the E", "ND of"]) == ("the END", "END")


@pytest.mark.parametrize("stops", [("a" * 255 + "b",), tuple("a" * k + "b" for k in range(200, 216))])
def test_time_is_linear_even_where_every_character_may_begin_a_match(stops):
    def seconds(length: int) -> float:
        watcher = matcher(*stops)
        watcher.push("a")  # builds
        began = time.process_time()
        for _ in range(length):
            watcher.push("a")
        return time.process_time() - began

    short, long = min(seconds(1_000) for _ in range(3)), min(seconds(8_000) for _ in range(3))
    assert long < 8 * short * 2.5


def test_matching_goes_on_cleanly_for_characters_outside_the_basic_plane():
    assert read(matcher("🙂🙃"), ["a🙂", "🙂🙃b"]) == ("a🙂", "🙂🙃")
