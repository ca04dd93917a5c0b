"""A setting, described where it is declared: a field of a configuration with its help, group and unit.

The command line, the pages, `/server_info` and the OpenAPI document read the descriptions; see `deploy/settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_KEY = "setting"  # of a field's metadata
_UNITS = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes", "tokens": "tokens"}  # last word of a name -> unit


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What a field's type and default do not say of a setting."""

    group: str  # its heading in --help and on the page of settings
    help: str
    unit: str | None = None  # of a number; None: a plain count, or in the name, as `_s` and `_bytes` are
    is_secret: bool = False  # masked wherever settings are shown
    is_key: bool = False  # a secret of which white space at the ends is no part
    has_flag: bool = True  # False: environment and file only, as every user can read flags in the process list
    in_file: Literal["value", "json", "mappings"] = "value"  # a YAML mapping may be its JSON text, or one of its values
    short_names: Mapping[str, str] = field(default_factory=dict)  # what else a value may be called


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings under one heading. Groups stand in the order of their first fields."""

    title: str

    def setting(
        self,
        default: T,
        help: str,
        *,
        unit: str | None = None,
        is_secret: bool = False,
        is_key: bool = False,
        has_flag: bool = True,
        in_file: Literal["value", "json", "mappings"] = "value",
        short_names: Mapping[str, str] | None = None,
    ) -> T:
        """A field of a frozen dataclass, typed as its default. See `SettingInfo` for the arguments."""
        info = SettingInfo(self.title, help, unit, is_secret or is_key, is_key, has_flag, in_file, short_names or {})
        made: T = field(default=default, metadata={_KEY: info})
        return made


def settings_of(kind: type[Any]) -> dict[str, SettingInfo]:
    """Name -> description of each field of a configuration, in the order of the fields. `TypeError` if one has none."""
    found = {}
    for each in dataclasses.fields(kind):
        info = each.metadata.get(_KEY)
        if info is None:
            raise TypeError(f"{kind.__name__}.{each.name}: declare it as SettingGroup(...).setting(default, help)")
        found[each.name] = info if info.unit else dataclasses.replace(info, unit=_UNITS.get(each.name.split("_")[-1]))
    return found
