"""Labels of engines: what is one, and what becomes of others."""

from __future__ import annotations

import pytest

from millrace.stages.errors import ConfigError
from millrace.stages.traffic.labels import MAX_LABELS, known_labels, parse_labels


def test_labels_are_names_and_values() -> None:
    assert parse_labels("--label", ["version=v2", "zone=eu-1.a"]) == {"version": "v2", "zone": "eu-1.a"}
    assert parse_labels("--label", []) == {}


@pytest.mark.parametrize("text", ["version", "=v2", "version=", "V=v2", "1x=v2", "a-b=v2", "v=v 2", "v=é", "v=-"])
def test_what_is_no_label_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE, such as version=v2") as refused:
        parse_labels("--label", [text])
    assert f"--label {text}:" in str(refused.value)


def test_a_name_that_comes_twice_and_too_many_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="version is v1 already"):
        parse_labels("--label", ["version=v1", "version=v2"])
    with pytest.raises(ConfigError, match=f"at most {MAX_LABELS}"):
        parse_labels("--label", [f"x{number}=1" for number in range(MAX_LABELS + 1)])


def test_of_what_an_engine_says_only_labels_are_known() -> None:
    told = {f"x{number}": "1" for number in range(MAX_LABELS)} | {"more": "1"}
    assert known_labels({"version": "v2", 'a"}': "1", "b": "x\ny"}) == {"version": "v2"}
    assert len(known_labels(told)) == MAX_LABELS
