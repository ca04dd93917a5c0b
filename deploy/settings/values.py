"""Text and YAML to values of a setting's type, and back. Each error says what the value must be."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

from ...stages.errors import ConfigError
from ...stages.setting import SettingInfo

_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])(i?)", re.ASCII)


def whole_number(text: str) -> int:
    """A number, perhaps with a unit as vLLM reads them: 8k is 8000, 8K is 8192, 1.5m, 1G, 2Ti. Else `ValueError`."""
    if (match := _WITH_UNIT.fullmatch(text.strip())) is None:
        return int(text)
    digits, unit, binary = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    factor = 1024**power if binary or unit.isupper() else 1000**power
    number = Decimal(digits) * factor
    if number != int(number):
        raise ValueError(f"{text} is no whole number")
    return int(number)


def from_text(where: str, hint: Any, text: str) -> Any:
    """The value in the text of an environment variable. `ConfigError` names `where`."""
    if typing.get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    if hint is bool:
        if text.lower() not in ("true", "1", "false", "0"):
            raise ConfigError(f"{where} = {text!r}: must be true or false")
        return text.lower() in ("true", "1")
    number, words = number_and_words(hint)
    if number in (int, float):
        try:
            return number_parser(number, words)(text)
        except ValueError:
            kind = " or ".join(["whole number" if number is int else "number", *words])
            raise ConfigError(f"{where} = {text!r}: must be a {kind}") from None
    return _checked(where, hint, text)


def from_yaml(where: str, hint: Any, value: Any) -> Any:
    """A value from a YAML file, which is typed already. `ConfigError` names `where`."""
    if value is None:
        return None
    if typing.get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(from_yaml(where, str, part) for part in values)
    hint, words = number_and_words(hint)
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        return whole_number(value)
    if hint in (bool, int, float, str) and type(value) is not hint and value not in words:
        raise ConfigError(f"{where} = {value!r}: must be {' or '.join([f'of type {hint.__name__}', *words])}")
    return _checked(where, hint, value)


def as_objects(value: Any) -> Any:
    """The mappings of a list as JSON, the text that the setting has for one."""
    values = value if isinstance(value, list) else [value]
    return [json.dumps(one, default=str) if isinstance(one, dict) else one for one in values if one is not None]


def full_name(info: SettingInfo, value: Any) -> Any:
    """`value`, or what it is the short name of."""
    return info.short_names.get(value, value) if isinstance(value, str) else value


def as_yaml(value: Any) -> str:
    """A value as YAML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return "[" + ", ".join(repr(part) for part in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)


def number_and_words(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """`int | Literal["auto"]` gives (int, ("auto",)); any other type gives (type, ())."""
    if typing.get_origin(hint) is not typing.Union:
        return hint, ()
    number, words = typing.get_args(hint)
    return number, typing.get_args(words)


def number_parser(number: Any, words: tuple[str, ...]) -> Callable[[str], Any]:
    """A function from text to a value; `ValueError` for neither number nor word. argparse prints its name."""

    def parse(text: str) -> Any:
        return text if text in words else whole_number(text) if number is int else number(text)

    parse.__name__ = " or ".join([number.__name__, *words])
    return parse


def _checked(where: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(typing.get_args(hint))}")
    return value
