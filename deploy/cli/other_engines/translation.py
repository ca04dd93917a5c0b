"""Replaces vLLM's flags among the arguments of a command by millrace's, by the table in `vllm_flags.py`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rows import ANY, Arguments, FlagError, Read, Renamed, Row, SoAnyway, Switch, Unsupported
from .vllm_flags import ALIASES, JSON_FORMS, JSON_OBJECTS, VALUES, VLLM

Options = Mapping[str, argparse.Action]  # of the command: flag -> what it does


@dataclass(frozen=True, slots=True)
class Note:
    """A flag of vLLM that was accepted."""

    flag: str
    ours: str  # the arguments that it became; empty: none, as `reason` says
    reason: str


@dataclass(slots=True)
class Translation:
    """The arguments so far, and what is to be told of them."""

    arguments: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def translate(arguments: Sequence[str], options: Options) -> Translation:
    """The arguments with `options` alone. `FlagError` for a flag that is refused; unknown ones stay as they are."""
    return _Reader(list(arguments), options).read()


class _Reader:
    """Reads the arguments from left to right."""

    def __init__(self, arguments: list[str], options: Options) -> None:
        self._left = arguments[::-1]
        self._options = options
        self._made = Translation()
        self._objects: dict[str, dict[str, Any]] = {}  # flag -> its JSON object, from --flag.key=value
        self._has_model = any(each.partition("=")[0] == "--model" for each in arguments)

    def read(self) -> Translation:
        while self._left:
            token = self._left.pop()
            if token == "--":
                self._made.arguments += [token, *self._left[::-1]]
                break
            if token.startswith("-") and len(token) > 1 and not token[1].isdigit():
                self._flag(token)
            else:
                self._has_model = True
                self._made.arguments.append(token)
        for flag, value in self._objects.items():
            if flag in JSON_OBJECTS:
                self._made.arguments += [flag, json.dumps(value)]
            else:
                self._row(flag, VLLM[flag], json.dumps(value))
        return self._made

    def _flag(self, token: str) -> None:
        name, equals, value = token.partition("=")
        given = value if equals else None
        if name.startswith("--"):
            name = name.replace("_", "-")
        name, dot, key = name.partition(".")
        name = ALIASES.get(name, name)
        if name in self._options and not dot:
            self._own(name, given)
        elif dot and (name in JSON_OBJECTS or isinstance(VLLM.get(name), Read)):
            self._objects.setdefault(name, {})[key.replace("-", "_")] = _as_json(self._value(name, given))
        elif name in VLLM:
            self._row(name, VLLM[name], given)
        elif name.startswith("--no-") and "--" + name[5:] in VLLM:
            self._off(name, VLLM["--" + name[5:]])
        else:
            self._made.arguments.append(token)

    # -- flags that millrace has too

    def _own(self, name: str, given: str | None) -> None:
        action = self._options[name]
        if isinstance(action, argparse.BooleanOptionalAction):
            self._made.arguments.append(self._as_switch(name, given))
        elif name in VALUES or name in JSON_FORMS:
            for value in [self._value(name, given), *self._more(action)]:
                self._made.arguments += self._renamed(name, value)
        else:
            self._made.arguments.append(name if given is None else f"{name}={given}")
            if given is None and action.nargs is None and self._left:  # its value, whatever that looks like
                self._made.arguments.append(self._left.pop())
            for value in self._more(action):
                self._made.arguments += [name, value]

    def _as_switch(self, name: str, given: str | None) -> str:
        """`--flag=false` and `--flag false` as `--no-flag`."""
        if given is None and self._left and self._left[-1].lower() in ("true", "false"):
            given = self._left.pop()
        if given is None:
            return name
        if given.lower() not in ("true", "false"):
            raise FlagError(f"{name}={given}: must be true or false; or write {name} alone")
        return name if given.lower() == "true" else "--no-" + name[2:]

    def _more(self, action: argparse.Action) -> list[str]:
        """Further values of a flag that may be repeated. NOTE: only once the model is named, which might be one."""
        found = []
        if isinstance(action, argparse._AppendAction) and self._has_model:
            while self._left and not self._left[-1].startswith("-"):
                found.append(self._left.pop())
        return found

    def _renamed(self, name: str, value: str) -> list[str]:
        if name in JSON_FORMS and value.lstrip().startswith("{"):
            return list(self._read(name, JSON_FORMS[name], value))
        row = VALUES.get(name)
        ours = value if row is None else row.values.get(value, value)
        if row is not None and ours != value:
            self._note(f"{name} {value}", f"{name} {ours}", row.note)
        return [name, ours]

    # -- flags of vLLM alone

    def _row(self, name: str, row: Row, given: str | None) -> None:
        match row:
            case Unsupported() | Switch() if given is not None and given.lower() == "false":
                self._off(name, row)
            case Unsupported(reason):
                raise FlagError(f"{name}: {reason}")
            case Switch(on):
                self._become(name, on)
            case SoAnyway(why, None):
                self._note(name, "", why)
            case SoAnyway(why, values, otherwise):
                value = self._value(name, given)
                if values != (ANY,) and value.lower() not in (values or ()):
                    raise FlagError(f"{name} {value}: {otherwise or 'not supported; leave it out'}")
                self._note(f"{name} {value}", "", why)
            case Renamed(ours, values, note):
                value = self._value(name, given)
                self._become(name, (ours, values.get(value, value)), note)
            case Read():
                made = self._read(name, row, self._value(name, given))
                self._become(name, made, row.note or ("" if made else "it is so anyway"))

    def _off(self, name: str, row: Row) -> None:
        """The `--no-` form of a flag: of one that is refused or has no effect here, it holds already."""
        match row:
            case Switch(_, off) if off is not None:
                self._become(name, off, "" if off else "it is so anyway")
            case Unsupported():
                self._note(name, "", "it is off anyway")
            case SoAnyway(why, None):
                self._note(name, "", why)
            case _:
                self._made.arguments.append(name)

    def _read(self, name: str, row: Read, value: str) -> Arguments:
        try:
            return row.read(_as_json(value))
        except FlagError as error:
            raise FlagError(f"{name}: {error}") from None

    def _become(self, name: str, ours: Arguments, note: str = "") -> None:
        for flag in ours:
            if flag.startswith("--") and flag not in self._options:
                raise FlagError(f"{name}: is {flag} here, which this command does not take; leave it out")
        self._made.arguments += ours
        self._note(name, " ".join(ours), note)

    def _note(self, flag: str, ours: str, reason: str) -> None:
        self._made.notes.append(Note(flag, ours, reason))

    def _value(self, name: str, given: str | None) -> str:
        if given is None and not (self._left and not self._left[-1].startswith("--")):
            raise FlagError(f"argument {name}: expected one argument")
        return self._left.pop() if given is None else given


def _as_json(text: str) -> Any:
    """The JSON value, or the text itself, as of a name without quotes; Python's words for JSON's are known too."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)
