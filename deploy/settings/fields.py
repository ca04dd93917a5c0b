"""The two configurations as a table: name, type, default and description of each setting."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...stages.config import EngineConfig
from ...stages.setting import SettingInfo, settings_of
from ..config import ServerConfig

ENV_PREFIX = "MILLRACE_"

Kind = type[EngineConfig] | type[ServerConfig]
KINDS: tuple[Kind, ...] = (EngineConfig, ServerConfig)


@dataclass(frozen=True, slots=True)
class SettingField:
    """A setting: its name in Python, its flag, variable and key in a file follow from `name`."""

    name: str
    hint: Any  # its type, without None
    default: Any
    info: SettingInfo

    @property
    def variable(self) -> str:
        """Of the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Of the command line, if it has one."""
        return "--" + self.name.replace("_", "-")


def fields_of(kind: Kind) -> Mapping[str, SettingField]:
    """The settings of a configuration, in the order of its fields. Read once: each command adds flags for them."""
    return _fields(typing.cast(Any, kind))


def groups_of(kind: Kind) -> dict[str, list[SettingField]]:
    """Title -> its settings."""
    groups: dict[str, list[SettingField]] = {}
    for field in fields_of(kind).values():
        groups.setdefault(field.info.group, []).append(field)
    return groups


def is_secret(name: str) -> bool:
    """Whether `name` is a setting whose value is masked."""
    return any(name in fields and fields[name].info.is_secret for fields in map(fields_of, KINDS))


@cache
def _fields(kind: Any) -> Mapping[str, SettingField]:
    hints, infos = typing.get_type_hints(kind), settings_of(kind)
    return {
        field.name: SettingField(field.name, _without_none(hints[field.name]), field.default, infos[field.name])
        for field in dataclasses.fields(kind)
    }


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(part for part in typing.get_args(hint) if part is not types.NoneType)]  # noqa: UP007
    return hint
