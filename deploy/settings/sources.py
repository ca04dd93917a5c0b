"""The effective value of each setting: flag, environment variable, file or default, the first that there is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...stages.errors import ConfigError
from .fields import ENV_PREFIX, KINDS, Kind, SettingField, fields_of
from .near_miss import near_miss
from .values import as_objects, as_yaml, from_text, from_yaml, full_name
from .yaml_file import YamlEntry, read_file

_NO_SETTINGS = frozenset({"cache"})  # variables of other parts, and of the tests


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of one setting, and its source."""

    value: Any
    source: str  # "flag --port", "environment MILLRACE_PORT", "file x.yaml", "default"
    is_secret: bool = False
    is_trimmed: bool = False  # white space around a key was removed


def resolve(
    kinds: Iterable[Kind], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Setting]:
    """The effective value of each field. `ConfigError` names the file or variable that is wrong."""
    in_file = read_file(file) if file is not None else {}
    fields = {name: field for kind in kinds for name, field in fields_of(kind).items()}
    settings: dict[str, Setting] = {}
    for name, field in fields.items():
        value, source = _find(field, flags, environment, in_file, file)
        setting = Setting(value, source, field.info.is_secret)
        settings[name] = _without_space(setting) if field.info.is_key else setting
    _check_names({*fields, *(name for kind in KINDS for name in fields_of(kind))}, environment, in_file, file)
    return settings


def build(kind: type[Any], settings: Mapping[str, Setting]) -> Any:
    """The configuration of that kind. `ConfigError` if values contradict each other."""
    return kind(**{field.name: settings[field.name].value for field in dataclasses.fields(kind)})


def parse(kind: Kind, name: str, text: str) -> Any:
    """Parses `text` as a value of the field `name`. "none" is None if that is the default.

    `ConfigError` says what the value must be."""
    field = fields_of(kind)[name]
    if text.lower() == "none" and field.default is None:
        return None
    return from_text(name, field.hint, text)


def show(settings: Mapping[str, Setting]) -> str:
    """One YAML line per setting, with its source as a comment. `--config` can read it back. Secrets are masked."""
    lines = []
    for name, setting in settings.items():
        value = "'***'" if setting.is_secret and setting.value else as_yaml(setting.value)
        lines.append(f"{name}: {value}  # {setting.source}")
    return "\n".join(lines)


def _find(
    field: SettingField,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, YamlEntry],
    file: Path | None,
) -> tuple[Any, str]:
    """The value of a setting, and its source."""
    if field.name in flags:
        source = "command line" if field.name == "model" else f"flag {field.flag}"
        return _as_tuple(flags[field.name]), source
    text = environment.get(field.variable, "")  # a variable that is set but empty counts as not set
    if text and not text.startswith("tcp://"):  # of Kubernetes, see _check_names
        value = from_text(field.variable, field.hint, full_name(field.info, text))
        return value, f"environment {field.variable}"
    if field.name in in_file:
        entry = in_file[field.name]
        return _from_entry(f"{file}:{entry.line}: {field.name}", field, entry.value), f"file {file}"
    return field.default, "default"


def _from_entry(where: str, field: SettingField, value: Any) -> Any:
    """The value of a setting that the file has."""
    if field.info.in_file == "mappings":
        value = as_objects(value)
    elif field.info.in_file == "json" and isinstance(value, dict):
        value = json.dumps(value)
    return from_yaml(where, field.hint, full_name(field.info, value))


def _without_space(setting: Setting) -> Setting:
    """Keys without the white space around them: secrets in files and variables often end with a line break."""
    keys = tuple(key.strip() if isinstance(key, str) else key for key in setting.value or ())
    return setting if keys == setting.value else dataclasses.replace(setting, value=keys, is_trimmed=True)


def _check_names(
    known: set[str], environment: Mapping[str, str], in_file: Mapping[str, YamlEntry], file: Path | None
) -> None:
    """`ConfigError` for an unknown setting of the file, and for a variable that is almost a setting's.

    Other variables with the prefix are not settings: for a service called millrace, Kubernetes sets
    MILLRACE_SERVICE_HOST, MILLRACE_PORT=tcp://... and more of the kind.
    """
    for name, entry in in_file.items():
        if name not in known:
            hint = near_miss(name, known)
            raise ConfigError(f"{file}:{entry.line}: unknown setting {name}{hint}; --help lists all settings")
    for variable in environment:
        name = variable.removeprefix(ENV_PREFIX).lower()
        is_ours = variable.startswith(ENV_PREFIX) and name not in known | _NO_SETTINGS
        if is_ours and near_miss(name, known, shortest=5):  # MILLRACE_POST may be another program's
            hint = near_miss(variable, (ENV_PREFIX + each.upper() for each in known))
            raise ConfigError(f"{variable}: no such setting{hint}; unset it or correct its name")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
