"""The forms in which the files of a checkpoint may hold chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, quoted
from ..files import read_json


def check_templates(root: Path, tokenizer_config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a `chat_template` that is neither a text nor named texts, in any file that has it."""
    files = {
        "tokenizer_config.json": tokenizer_config,
        "chat_template.json": read_json(root, "chat_template.json") or {},
    }
    for name, values in files.items():
        value = values.get("chat_template")
        if not _is_template(value):
            form = "a text, or a list of objects with a name and a template"
            raise CheckpointError(f"{name} ({root}): chat_template: must be {form}, not {quoted(value)}")


def _is_template(value: object) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            for entry in value
        )
    if isinstance(value, dict):
        return all(isinstance(template, str) for template in value.values())
    return value is None or isinstance(value, str)
