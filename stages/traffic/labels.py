"""Labels of engines: what an operator says of one, such as `version=v2`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..errors import ConfigError

MAX_LABELS = 16  # of one engine
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")

Labels = Mapping[str, str]


def parse_label(flag: str, text: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE. Raises `ConfigError`."""
    name, equals, value = text.partition("=")
    if not equals or not is_label(name, value):
        raise ConfigError(
            f"{flag} {text}: must be NAME=VALUE, such as version=v2; a name has up to 32 of a-z, 0-9 and _, and begins "
            "with a letter; a value has up to 63 of letters, digits, ., _ and -"
        )
    return name, value


def parse_labels(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """The labels of these texts. Raises `ConfigError`, also for a name that comes twice."""
    labels: dict[str, str] = {}
    for text in texts:
        name, value = parse_label(flag, text)
        if name in labels:
            raise ConfigError(f"{flag} {text}: {name} is {labels[name]} already; give each name once")
        labels[name] = value
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"{flag}: {len(labels)} labels; an engine has at most {MAX_LABELS}")
    return labels


def is_label(name: str, value: str) -> bool:
    """Whether an engine may have this label."""
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(value))


def known_labels(labels: Labels) -> dict[str, str]:
    """What an engine says of itself, without what is no label here: it may be of another version."""
    known = {name: value for name, value in labels.items() if is_label(name, value)}
    return dict(list(known.items())[:MAX_LABELS])
