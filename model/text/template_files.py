"""Where a model's chat templates are: a file, a text or a name that the operator gives, or the checkpoint's files."""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, TemplateError, quoted
from ..files import checkpoint_file, read_json, read_text

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates: for any chat, and for a chat with tools
FOLDER = "additional_chat_templates"
FILE_BYTES = 1 << 20  # largest template file that is read


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template, and where it was found."""

    text: str
    origin: str  # for errors and for the log


def find_templates(root: Path, config: Mapping[str, Any], wanted: str | None) -> dict[str, TemplateSource]:
    """The chat templates of a model by name; empty if there are none.

    With `wanted` (the operator's), that one is the only template: the path of a file, the name of one of the
    checkpoint's templates, or the text itself. `config` is tokenizer_config.json. Raises TemplateError or
    CheckpointError, each with the file.
    """
    found = _checkpoint_templates(root, config)
    return found if wanted is None else {DEFAULT: _wanted_template(wanted, found)}


def template_in_file(wanted: str) -> TemplateSource | None:
    """The operator's template if it is the path of a file. Raises TemplateError for a file that cannot be one."""
    if not wanted.strip():
        raise TemplateError(f"{_setting(wanted)}: is empty; give the path of a file, or leave the setting out")
    text = _file_text(wanted, _setting(wanted))
    if text is None:
        return None
    if not text.strip():
        raise TemplateError(f"{_setting(wanted)}: the file is empty; it must hold a Jinja template")
    return TemplateSource(text, f"file {wanted} (setting chat_template)")


def _setting(wanted: str) -> str:
    return f"chat_template = {wanted[:200]!r}"


def _wanted_template(wanted: str, found: Mapping[str, TemplateSource]) -> TemplateSource:
    if (file := template_in_file(wanted)) is not None:
        return file
    if wanted in found:
        return TemplateSource(found[wanted].text, f"{wanted} of {found[wanted].origin} (setting chat_template)")
    if "{" in wanted:
        return TemplateSource(wanted, "text of the setting chat_template")
    names = f", nor a template of the checkpoint ({', '.join(sorted(found))})" if len(found) > 1 else ""
    raise TemplateError(
        f"{_setting(wanted)}: no such file{names}, and not the text of a template, which would hold {{{{ or {{%; "
        "give the path of a Jinja file"
    )


def _file_text(path: str, shown: str) -> str | None:
    """The content of a file that the operator names; None if there is no such file."""
    place = Path(path).expanduser()
    try:
        mode = place.stat().st_mode
        if stat.S_ISREG(mode) and place.stat().st_size <= FILE_BYTES:
            return place.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise TemplateError(f"{shown}: not valid UTF-8: {error.reason} at byte {error.start}") from None
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise TemplateError(f"{shown}: cannot be read: {error.strerror}") from None
        return None
    if stat.S_ISDIR(mode):
        raise TemplateError(f"{shown}: is a folder; give the path of a Jinja file")
    if not stat.S_ISREG(mode):
        raise TemplateError(f"{shown}: must be a regular file, as it may be read more than once")
    raise TemplateError(f"{shown}: {place.stat().st_size} bytes, and at most {FILE_BYTES} are read")


def _checkpoint_templates(root: Path, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """Files of their own come before tokenizer_config.json, as in transformers, and chat_template.json comes last."""
    found = {DEFAULT: "chat_template.jinja"} | {Path(name).stem: name for name in _additional_files(root)}
    texts = {name: (read_text(root, file), file) for name, file in found.items()}
    if by_name := {name: TemplateSource(text, f"{file} ({root})") for name, (text, file) in texts.items() if text}:
        return by_name
    return _in_config(root, "tokenizer_config.json", config) or _in_config(
        root, "chat_template.json", read_json(root, "chat_template.json") or {}
    )


def _additional_files(root: Path) -> list[str]:
    folder = root / FOLDER
    names = sorted(path.name for path in folder.glob("*.jinja")) if folder.is_dir() else []
    return [f"{FOLDER}/{name}" for name in names if checkpoint_file(root, f"{FOLDER}/{name}") is not None]


def _in_config(root: Path, file: str, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """The templates under the key chat_template: a text, a list of names and texts, or a mapping of them."""
    stored = config.get("chat_template")
    by_name = {DEFAULT: stored} if isinstance(stored, str) else stored or {}
    if isinstance(stored, list) and all(isinstance(entry, dict) and "name" in entry for entry in stored):
        by_name = {entry["name"]: entry.get("template") for entry in stored}
    if not isinstance(by_name, dict) or not all(isinstance(text, str) for item in by_name.items() for text in item):
        raise CheckpointError(
            f"{file} ({root}): chat_template: must be a text, or a list of objects with a name and a template, "
            f"not {quoted(stored)}"
        )
    return {name: TemplateSource(text, f"{file} ({root})") for name, text in by_name.items() if text}
