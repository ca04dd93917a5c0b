"""The required format of an answer: JSON schema, regular expression, choices or grammar.

Names are vLLM's. This file checks sizes and JSON syntax. Compiling a grammar takes the model's vocabulary and is done
in `model/text/grammar.py`. Plain data that can be compared, hashed and sent between processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import ErrorText, Refused

MAX_GRAMMAR_BYTES = 64 * 1024  # of a schema, of a grammar, or of all choices together
MAX_REGEX_BYTES = 1024
MAX_CHOICES = 1024
MAX_MARKER_BYTES = 64
MAX_SCHEMA_DEPTH = 32
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSection:
    """The thoughts that come before the format, with the texts that mark them.

    Where the prompt has opened the section, it must be closed first. Otherwise an answer may begin with one.
    """

    start: str
    end: str
    is_open: bool  # the prompt ends inside the section

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            _check_size(f"after.{name}", getattr(self, name), MAX_MARKER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The required format of an answer; exactly one of the five kinds is set.

    Raises `Refused` on construction, with the field and its limit. A mapping or boolean in `json` is converted to text.
    The order of its keys is kept: it is the order of the keys in the answer.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None  # matches the whole answer; syntax of Rust's `regex`: no lookaround, no backreferences
    choice: tuple[str, ...] | None = None  # the answer is one of these strings
    grammar: str | None = None  # llguidance's Lark dialect, or GBNF (`root ::= ...`)
    json_object: bool = False  # any JSON object
    disable_any_whitespace: bool = False  # for json and json_object: no whitespace but one space after ":" and ","
    after: ThinkingSection | None = None  # the format begins after this section

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "must be true or false")
        given = self._given()
        if len(given) != 1:
            found = ", ".join(given) or "none"
            _refuse("", f"has {found}: must have exactly one of {', '.join(KINDS)}")
        getattr(self, f"_check_{given[0]}")()

    @property
    def kind(self) -> str:
        """The kind that is set."""
        return self._given()[0]

    def _given(self) -> list[str]:
        """The kinds that are set, be it to 0 or false; json_object counts only when true."""
        return [name for name in KINDS if getattr(self, name) is not (False if name == "json_object" else None)]

    def _check_json(self) -> None:
        schema = _read_schema(self.json)
        if not isinstance(schema, (dict, bool)):
            _refuse("json", "must be a JSON schema: an object, or true")
        if schema is False:
            _refuse("json", "= false: must be another schema, as no answer can match this one")
        if any(depth > MAX_SCHEMA_DEPTH for depth in _depths(schema)):
            _refuse("json", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
        text = _write_schema(schema)
        object.__setattr__(self, "json", text)
        _check_size("json", text, MAX_GRAMMAR_BYTES)

    def _check_json_object(self) -> None:
        pass

    def _check_regex(self) -> None:
        _check_size("regex", self.regex, MAX_REGEX_BYTES)

    def _check_grammar(self) -> None:
        _check_size("grammar", self.grammar, MAX_GRAMMAR_BYTES)

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, (tuple, list)) or not 1 <= len(choice) <= MAX_CHOICES:
            _refuse("choice", f"must be a list of 1 to {MAX_CHOICES} strings")
        object.__setattr__(self, "choice", tuple(choice))
        for text in choice:
            _check_size("choice", text, MAX_GRAMMAR_BYTES)
        num_bytes = sum(len(text.encode()) for text in choice)
        if num_bytes > MAX_GRAMMAR_BYTES:
            _refuse("choice", f"has {num_bytes} bytes in all: at most {MAX_GRAMMAR_BYTES}")


def _read_schema(given: object) -> Any:
    """The schema as a JSON value, from text or from a Python value."""
    try:
        if isinstance(given, str):
            _check_size("json", given, MAX_GRAMMAR_BYTES)
            return json.loads(given, parse_constant=_no_number)
        if any(depth > MAX_SCHEMA_DEPTH for depth in _depths(given)):
            _refuse("json", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
        return json.loads(json.dumps(given, allow_nan=False))
    except RecursionError:
        _refuse("json", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    except (ValueError, TypeError) as error:
        _refuse("json", f"is not JSON: {str(error)[:100]}")


def _write_schema(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        _refuse("json", "holds a number that is too large")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _depths(value: Any) -> Iterator[int]:
    """The depth of each object and list in `value`, breadth first; the outermost has depth 1."""
    level, depth = [value], 0
    while level:
        level = [item for item in level if isinstance(item, (Mapping, list, tuple))]
        depth += 1
        if level:
            yield depth
        if depth > MAX_SCHEMA_DEPTH:
            return
        level = [part for item in level for part in (item.values() if isinstance(item, Mapping) else item)]


def _check_size(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not text:
        _refuse(name, "must be text, and not empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        _refuse(name, f"holds an unpaired surrogate (U+{ord(text[error.start]):04X})")
    if num_bytes > most:
        _refuse(name, f"has {num_bytes} bytes: at most {most}")


def _refuse(name: str, problem: str) -> NoReturn:
    field = f"structured_outputs.{name}" if name else "structured_outputs"
    raise Refused(ErrorText(("", field, f" {problem}")), param="structured_outputs")
