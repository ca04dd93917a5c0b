"""The file of `--config`: each setting's value and line. Settings that stand there twice are an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...stages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """A value of the YAML file."""

    value: Any
    line: int  # of its name, from 1


def read_file(file: Path) -> dict[str, YamlEntry]:
    """The settings of a YAML file. `ConfigError` with the line of what is wrong."""
    import yaml  # slow to import, and needed only with --config

    try:
        text = file.read_text("utf-8")
        data, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
        entries = list(_entries(root)) if isinstance(root, yaml.MappingNode) else []
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: --config must name a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{file}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from None
    if data is None or root is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must be a mapping, with one line `name: value` per setting")
    construct = yaml.SafeLoader("").construct_object
    found: dict[str, YamlEntry] = {}
    lines: dict[str, int] = {}  # of the file's own settings
    for key, value, is_own in entries:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if is_own and name in lines:
            raise ConfigError(f"{file}:{line}: {name} is in line {lines[name]} already; remove one of them")
        if is_own:
            lines[name] = line
        found[name] = YamlEntry(construct(value, deep=True), line)
    return found


def _entries(mapping: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Name and value of each setting of a YAML mapping, and whether it is not merged by `<<`; a later one counts.

    NOTE: of several merged mappings the first counts, by YAML's rules; PyYAML 6.0.4 lets the last one count.
    """
    for key, value in mapping.value:
        if key.tag == "tag:yaml.org,2002:merge":
            parts = value.value if value.id == "sequence" else [value]
            yield from ((name, each, False) for part in reversed(parts) for name, each, _ in _entries(part))
    yield from ((key, value, True) for key, value in mapping.value if key.tag != "tag:yaml.org,2002:merge")
