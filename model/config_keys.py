"""Typed access to the JSON object of a configuration file. Errors name the file, the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import CheckpointError, UnbuiltError, quoted


class ConfigKeys:
    """Typed access to a JSON object; errors name the source, the key and the value."""

    def __init__(self, values: Mapping[str, Any], source: str, stored_names: Mapping[str, str] | None = None) -> None:
        """`stored_names`: names of keys as in the file, where they differ from those in `values`."""
        self.values = values
        self.source = source
        self.stored_names = stored_names or {}

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {self.stored_names.get(key, key)}: {problem}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raises UnbuiltError for a right value whose computation is not built."""
        raise UnbuiltError(f"{self.source}: {self.stored_names.get(key, key)}: {problem}")

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limit = "2**31 - 1" if most == 2**31 - 1 else most
            self.fail(key, f"must be a whole number from {least} to {limit}, not {quoted(value)}")
        return int(value)

    def number(self, key: str, default: float | None = None, most: float = 1e30) -> float:
        number = self.optional_number(key, most=most)
        if number is None:
            number = default
        if number is None:
            self.fail(key, "is missing")
        return number

    def optional_number(self, key: str, least: float = 0.0, most: float = 1e9) -> float | None:
        """The number of a key that may be absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.fail(key, f"must be a number from {least:g} to {most:g}, not {quoted(value)}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        number = self.number(key, default)
        if number == 0:
            self.fail(key, "must be above 0")
        return number

    def cap(self, key: str, default: float | None) -> float | None:
        """A cap that null switches off. The default holds where the key is absent."""
        return self.positive(key) if self.values.get(key) is not None else None if key in self.values else default

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {quoted(value)}")
        return bool(value)

    def is_null(self, key: str) -> bool:
        """Whether the key is there, without a value."""
        return key in self.values and self.values[key] is None

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a key that holds one id, a list of ids, or nothing. Those that no token has are left out."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.fail(key, f"must be a token id or a list of them, not {quoted(value)}")
        return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing")
        return value
