"""The chat templates in the folders of adapters, which render the chats that name them if the settings say so."""

from __future__ import annotations

from pathlib import Path

from ...model.errors import ModelError, TemplateError
from ...model.text.chat_template import ChatTemplate
from ...model.text.tokenizer import Tokenizer
from .registry import AdapterRegistry


class AdapterTemplates:
    """Reads the template of a name's folder when a chat first needs it. Called from several threads at once."""

    def __init__(self, registry: AdapterRegistry, tokenizer: Tokenizer, max_chars: int) -> None:
        """`max_chars`: of a rendered chat."""
        self._registry, self._tokenizer, self._max_chars = registry, tokenizer, max_chars
        self._found: dict[str, tuple[Path, ChatTemplate | None]] = {}  # by name: the folder, and its template

    def find(self, name: str) -> ChatTemplate | None:
        """The template of an adapter; None if the model's renders its chats.

        A folder is read once for each load of its name. Raises TemplateError for a template that cannot be used.
        """
        entry = self._registry.find(name)
        folder = None if entry is None else entry.folder or entry.path
        if folder is None or not folder.is_dir():  # it was unloaded, or is not downloaded
            return None
        known = self._found.get(name)
        if known is None or known[0] != folder:
            known = self._found[name] = (folder, self._read(folder, name))
        return known[1]

    def forget(self, name: str) -> None:
        """The name stands for other files now, or for none."""
        self._found.pop(name, None)

    def _read(self, folder: Path, name: str) -> ChatTemplate | None:
        try:
            template = ChatTemplate.read_beside(folder, self._tokenizer)
        except ModelError as error:
            raise TemplateError(f"adapter '{name}': {error}") from None
        if template is not None:
            template.allow(self._max_chars)
        return template
