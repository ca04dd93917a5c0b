"""The values of a message in a recording, checked one by one: a file is not trusted."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..messages import Ints

Fields = dict[str, Any]  # of a message: plain values and arrays


class InvalidValue(ValueError):
    """An invalid value in a recording. The message names it and the valid values."""


@dataclass(frozen=True, slots=True)
class MessageFields:
    """The fields of a message from a file.

    Each method checks one field and returns it, or raises `InvalidValue`.
    """

    kind: str
    values: Mapping[str, Any]

    def whole(self, name: str, least: int = 0, most: int = 2**31 - 1) -> int:
        """A whole number."""
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            raise InvalidValue(f"{self.kind}.{name} = {shown(value)}: must be a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float = 0.0) -> float:
        """A finite number."""
        value: Any = self.values.get(name)
        if type(value) not in (int, float) or not least <= value < float("inf"):
            raise InvalidValue(f"{self.kind}.{name} = {shown(value)}: must be a finite number of at least {least:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.values.get(name)
        if type(value) is not bool:
            raise InvalidValue(f"{self.kind}.{name} = {shown(value)}: must be true or false")
        return value

    def text(self, name: str, most: int = 512) -> str:
        """A text of at most `most` characters."""
        value = self.values.get(name)
        if type(value) is not str or len(value) > most:
            raise InvalidValue(f"{self.kind}.{name} = {shown(value)}: must be a text of at most {most} characters")
        return value

    def wholes(self, name: str, most: int, least: int = 0) -> list[int]:
        """A list of whole numbers."""
        values = self.values.get(name)
        if type(values) is not list or any(type(v) is not int or not least <= v <= most for v in values):
            raise InvalidValue(f"{self.kind}.{name} = {shown(values)}: must be whole numbers from {least} to {most}")
        return values

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A list of texts of at most `most` characters."""
        values = self.values.get(name)
        if type(values) is not list or any(type(v) is not str or len(v) > most for v in values):
            raise InvalidValue(f"{self.kind}.{name} = {shown(values)}: must be texts of at most {most} characters")
        return tuple(values)

    def tokens(self, name: str, count: int) -> Ints:
        """`count` token ids; zeros if none were written."""
        value = self.values.get(name)
        if value is None:
            return np.zeros(count, np.int32)
        try:
            data = base64.b64decode(value, validate=True)
        except (TypeError, ValueError):
            raise InvalidValue(f"{self.kind}.{name}: must be base64") from None
        if len(data) != 4 * count:
            raise InvalidValue(f"{self.kind}.{name} holds {len(data)} bytes: must be 4 for each of {count} tokens")
        token_ids = np.frombuffer(data, "<i4").astype(np.int32)
        if count and int(token_ids.min()) < 0:
            raise InvalidValue(f"{self.kind}.{name} holds {int(token_ids.min())}: a token id must be at least 0")
        return token_ids


def shown(value: Any) -> str:
    """A value for an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 48 else text[:45] + "..."
