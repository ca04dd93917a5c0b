"""The adapters that clients may name: where their files are, and what they compute."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, Refused

MAX_NAME_CHARS = 256


class UnknownAdapter(Refused):
    """There is no such adapter, or no such folder."""

    status = 404
    type = "NotFoundError"


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """One name. `digest` is that of its last load; "" before the first."""

    name: str
    path: Path
    digest: str = ""
    parent: str | None = None  # the model that its file names
    rank: int = 0
    num_bytes: int = 0
    num_uses: int = 0  # requests so far
    load_s: float = 0.0
    error: str = ""  # of the last load
    failed_at_s: float = -1e9  # monotonic


class AdapterRegistry:
    """Adapters by name: those of the settings, those of a folder, and those loaded while the engine runs.

    A folder is listed again when a name is not known. An entry is replaced when its name is loaded again, so requests
    in progress go on with the digest that they have.
    """

    def __init__(self, modules: dict[str, Path], folder: Path | None = None) -> None:
        self.folder = folder
        self._entries = {name: AdapterEntry(name, path) for name, path in modules.items()}
        self._hidden: set[str] = set()  # names of the folder that were unloaded
        self.scan()

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(list(self._entries.values()))

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def find(self, name: str) -> AdapterEntry | None:
        """The adapter of that name; None if there is none."""
        if name not in self._entries:
            self.scan()
        return self._entries.get(name)

    def require(self, name: str) -> AdapterEntry:
        """The adapter of that name. Raises `Refused` 404, with the nearest names, if there is none."""
        entry = self.find(name)
        if entry is None:
            message = f"model = {name[:64]!r}: no adapter of that name{self.near_misses(name)}"
            raise UnknownAdapter(message, code="model_not_found", param="model")
        return entry

    def near_misses(self, name: str) -> str:
        """The nearest names, for an error message; "" if there are none."""
        near = difflib.get_close_matches(name[:MAX_NAME_CHARS], self._entries, n=3)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def put(self, name: str, path: Path) -> AdapterEntry:
        """Adds a name, or replaces its entry."""
        self._hidden.discard(name)
        self._entries[name] = AdapterEntry(name, path)
        return self._entries[name]

    def restore(self, name: str, entry: AdapterEntry | None) -> None:
        """Takes `put` back, after a load that failed; `entry` was there before."""
        if entry is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = entry

    def remove(self, name: str) -> AdapterEntry | None:
        """Removes a name at once; None if it is not known."""
        entry = self.find(name)
        if entry is not None:
            del self._entries[name]
            self._hidden.add(name)
        return entry

    def scan(self) -> None:
        """Adds the adapters in the folder: each subfolder with an adapter_config.json, by its name."""
        if self.folder is None:
            return
        try:
            found = sorted(path for path in self.folder.iterdir() if (path / "adapter_config.json").is_file())
        except OSError:
            return
        for path in found:
            if path.name not in self._hidden and len(path.name) <= MAX_NAME_CHARS:
                self._entries.setdefault(path.name, AdapterEntry(path.name, path))  # a thread may look a name up

    def path_of(self, text: str) -> Path:
        """The folder that a client names, which must be in the registry's folder. Raises `Refused`."""
        if self.folder is None:
            raise Refused(
                "lora_path: this server loads adapters from its --lora-dir only, and has none", param="lora_path"
            )
        root = self.folder.resolve()
        path = (root / text).resolve()
        if not path.is_relative_to(root) or path == root:
            raise Refused(f"lora_path = {text[:256]!r}: must be a folder in the server's --lora-dir", param="lora_path")
        if not path.is_dir():
            message = f"lora_path = {text[:256]!r}: no such folder in the server's --lora-dir"
            raise UnknownAdapter(message, code="not_found", param="lora_path")
        return path


def parse_modules(modules: tuple[str, ...]) -> dict[str, Path]:
    """The adapters of the setting lora_modules: name=path each."""
    found: dict[str, Path] = {}
    for text in modules:
        name, _, path = text.partition("=")
        if not name or not path or len(name) > MAX_NAME_CHARS:
            raise ConfigError(f"lora_modules = {text}: must be name=path, as in sql=/adapters/sql")
        if name in found:
            raise ConfigError(f"lora_modules: two adapters have the name {name}; give each its own")
        found[name] = Path(path)
    return found
