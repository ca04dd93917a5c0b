"""Code of users that a setting names: `package.module:Class`, or the short name of an installed package's entry point.

Every error is a `ConfigError` that begins with the setting, and says what is wrong and what would be right.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")  # of a stage in the pipeline: a part of metrics' names
_PARTS = re.compile(r"(?P<target>[^@,\s{}]+)(@(?P<side>after|before)=(?P<place>[^@,\s]+))?(?P<rest>(,.*)?)", re.DOTALL)
_KEYS = ("class", "after", "before", "name", "arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """What a setting says of one plugin, parsed and not yet imported."""

    text: str  # of the setting, for errors
    target: str  # package.module:Class, or the name of an entry point
    after: str | None = None  # the place of a stage; both None: the target says its own
    before: str | None = None
    name: str | None = None  # of a stage in the pipeline; None: the stage's own
    arguments: Mapping[str, Any]


def parse_plugins(setting: str, texts: Iterable[str], *, has_place: bool = True) -> list[PluginSpec]:
    """Parses the values of a setting: `TARGET[@after=PLACE][,name=NAME][,key=value]`, or a JSON object.

    A value of an argument is JSON, or else text. The object has the keys `class`, `after` or `before`, `name` and
    `arguments`; only there may values have commas. Without `has_place` there is no place.
    """
    return [_parse(setting, text, has_place) for text in _joined(texts)]


def _joined(texts: Iterable[str]) -> list[str]:
    """The values: an environment variable is split at each comma, so `key=value` belongs to the part before."""
    found: list[str] = []
    for text in texts:
        is_rest = bool(re.match(r"\s*\w+\s*=", text)) and found and not found[-1].startswith("{")
        if is_rest:
            found[-1] += "," + text
        else:
            found.append(text)
    return found


def _parse(setting: str, text: str, has_place: bool) -> PluginSpec:
    where = f"{setting} = {text}"
    if text.lstrip().startswith("{"):
        return _parse_object(setting, text, has_place)
    parts = _PARTS.fullmatch(text.strip())
    form = "package.module:Class@after=STAGE[,key=value]" if has_place else "package.module:Class[,key=value]"
    if parts is None or (parts["side"] and not has_place):
        raise ConfigError(f"{where}: must be {form}, or have the name of an installed entry point as its class")
    arguments: dict[str, Any] = {}
    for pair in filter(None, parts["rest"].split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(f"{where}: {pair!r} must be key=value; values with commas go into the --config file")
        if key.strip() in arguments:
            raise ConfigError(f"{where}: {key.strip()} is there twice; remove one of them")
        arguments[key.strip()] = _value(value.strip())
    name = arguments.pop("name", None)
    place = {parts["side"]: parts["place"]} if parts["side"] else {}
    return PluginSpec(text=text, target=parts["target"], name=_checked_name(where, name), arguments=arguments, **place)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_object(setting: str, text: str, has_place: bool) -> PluginSpec:
    keys = _KEYS if has_place else ("class", "name", "arguments")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{setting} = {text}: is not JSON: {error}") from None
    target, arguments = found.get("class"), found.get("arguments") or {}
    where = f"{setting} = {target or text}"
    for key in found:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key}{near_miss(key, keys)}; it has {', '.join(keys)}")
    if not isinstance(target, str):
        raise ConfigError(f"{where}: class must be package.module:Class, or the name of an installed entry point")
    if not isinstance(arguments, dict) or not all(str(key).isidentifier() for key in arguments):
        raise ConfigError(f"{where}: arguments must be a mapping from names to values")
    if "after" in found and "before" in found:
        raise ConfigError(f"{where}: has both after and before; leave one of them out")
    for side in ("after", "before"):
        if not isinstance(found.get(side, ""), str):
            raise ConfigError(f"{where}: {side} must be the name of a stage")
    name = _checked_name(where, found.get("name"))
    sides = {side: found.get(side) for side in ("after", "before")}
    return PluginSpec(text=target, target=target, name=name, arguments=arguments, **sides)


def _checked_name(where: str, name: object) -> str | None:
    if name is None or (isinstance(name, str) and NAME.fullmatch(name)):
        return name
    raise ConfigError(f"{where}: name = {name!r}: must be letters, digits and _, and begin with a letter")


# -- importing


def find_plugin(setting: str, target: str, group: str) -> Any:
    """What `package.module:Class` is, or the entry point `target` of the group `group`."""
    where = f"{setting} = {target}"
    module, colon, path = target.partition(":")
    if not colon:
        return _entry_point(where, target, group)
    if not module or not path:
        raise ConfigError(f"{where}: must be package.module:Class, such as my_package.stages:Redactor")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: {module} imports {error.name}, which is not installed") from error
        advice = "install its package, or name its folder in PYTHONPATH"
        raise ConfigError(f"{where}: there is no module {error.name}; {advice}") from None
    except Exception as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            hint = near_miss(part, [name for name in vars(found) if not name.startswith("_")])
            raise ConfigError(f"{where}: {module} has no {path}{hint}")
        found = getattr(found, part)
    return found


def _entry_point(where: str, name: str, group: str) -> Any:
    points = {point.name: point for point in importlib.metadata.entry_points(group=group)}
    if name not in points:
        known = f"installed are {', '.join(sorted(points))}" if points else f"no package offers any in {group}"
        message = f"no installed package has this name{near_miss(name, points)}: {known}; or use package.module:Class"
        raise ConfigError(f"{where}: {message}")
    try:
        return points[name].load()
    except Exception as error:
        message = f"{points[name].value} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {message}") from error


def make_plugin(setting: str, spec: PluginSpec, make: Callable[..., Any]) -> Any:
    """Calls a class or function with the arguments of `spec`."""
    where = f"{setting} = {spec.text}"
    parameters = inspect.signature(make).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    known = [name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name in spec.arguments:
        if name not in known and not takes_any:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(f"{where}: unknown argument {name}{near_miss(name, known)}; {takes}")
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in spec.arguments:
            raise ConfigError(f"{where}: the argument {name} is missing; add ,{name}=VALUE")
    try:
        return make(**spec.arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error


def near_miss(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` with the known name most like `name`, or the empty string."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""
