"""The adapters that clients may name: where their files are, and what they compute."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...runtime.env.log import get_logger
from ..errors import ConfigError, Refused, field_text

MAX_NAME_CHARS = 256
MAX_NAMES = 10_000  # those of the settings and the folder included
MAX_CANDIDATES = 100  # names that are compared with an unknown one, for the message
MAX_COMPARED_CHARS = 64

log = get_logger("millrace.stages")


class UnknownAdapter(Refused):
    """There is no such adapter, or no such folder."""

    status = 404
    type = "NotFoundError"


class NoRoom(Refused):
    """An adapter cannot be pinned beside those that are."""

    status = 409
    type = "ConflictError"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="adapters_pinned")


Pin = Literal["host", "device"]  # an adapter stays in host memory; on the device also in the slot that it gets


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """One name. `digest` is that of its first load; "" before. An entry never changes its digest."""

    name: str
    path: Path
    folder: Path | None = None  # of an adapter of the Hub, once it is downloaded; the commit is its name
    digest: str = ""
    parent: str | None = None  # the model that its file names
    rank: int = 0
    num_bytes: int = 0
    num_uses: int = 0  # requests so far
    pin: Pin | None = None
    load_s: float = 0.0
    error: str = ""  # of the last load
    failed_at_s: float = -1e9  # monotonic


class AdapterRegistry:
    """Adapters by name: those of the settings, of a folder and of the Hub, and those loaded while the engine runs.

    The folder is listed once; a name that is not known is looked up in it. An entry is replaced when its name is
    loaded again, so requests in progress go on with the digest that they have. Any thread may look a name up, so names
    change, and are copied, in single operations; only the event loop publishes and removes them.
    """

    def __init__(self, modules: dict[str, Path], folder: Path | None = None, hub: tuple[str, ...] = ()) -> None:
        """`hub`: Hub ids, perhaps with @revision, which are the paths of their entries."""
        self.folder = folder
        self._entries = {text.partition("@")[0]: AdapterEntry(text.partition("@")[0], Path(text)) for text in hub}
        self._entries |= {name: AdapterEntry(name, path) for name, path in modules.items()}
        self._configured = {name: entry.path for name, entry in self._entries.items()}  # also once they are unloaded
        self._module_names = frozenset(modules)
        self._hidden: set[str] = set()  # names of the folder that were unloaded, or that the model has
        self._list_folder()

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(list(self._entries.values()))

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def find(self, name: str) -> AdapterEntry | None:
        """The adapter of that name; None if there is none."""
        entry = self._entries.get(name)
        return self._find_in_folder(name) if entry is None else entry

    def require(self, name: str) -> AdapterEntry:
        """The adapter of that name. Raises `Refused` 404, with the nearest names, if there is none."""
        entry = self.find(name)
        if entry is None:
            problem = f"no adapter of that name{self.near_misses(name)}"
            raise UnknownAdapter(field_text("model", problem, repr(name[:64])), code="model_not_found")
        return entry

    def names_by_digest(self) -> dict[str, list[str]]:
        """The names of each adapter that was loaded, sorted; several where their files compute the same."""
        found: dict[str, list[str]] = {}
        for entry in sorted(self, key=lambda one: one.name):
            if entry.digest:
                found.setdefault(entry.digest, []).append(entry.name)
        return found

    def near_misses(self, name: str) -> str:
        """The nearest names, for an error message; "" if there are none. Of many names, only its neighbours count."""
        known, name = sorted(self._entries), name[:MAX_COMPARED_CHARS]
        place = max(0, bisect.bisect(known, name) - MAX_CANDIDATES // 2)
        near = difflib.get_close_matches(name, known[place : place + MAX_CANDIDATES], n=3)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def publish(self, entry: AdapterEntry, before: AdapterEntry | None) -> bool:
        """Makes a loaded adapter the one of its name; False if the name does not lead to `before` any more."""
        if self._entries.get(entry.name) is not before:
            return False
        self._entries[entry.name] = entry
        self._hidden.discard(entry.name)
        return True

    def remove(self, name: str) -> AdapterEntry | None:
        """Removes a name at once; None if it is not known."""
        entry = self.find(name)
        if entry is not None:
            if self._subfolder(name) is not None:
                self._hidden.add(name)
            self._entries.pop(name, None)
        return entry

    def check_room(self) -> None:
        """Raises `Refused` if no further name may be loaded."""
        if len(self._entries) >= MAX_NAMES:
            problem = f"this server has {len(self._entries)} adapters and takes at most {MAX_NAMES}; unload some"
            raise Refused(field_text("lora_name", problem))

    def exclude(self, names: Collection[str]) -> None:
        """Keeps the model's own names from adapters. Raises `ConfigError` if lora_modules has one of them."""
        for name in sorted(self._module_names & set(names)):
            raise ConfigError(f"lora_modules: {name} is the model's own name; give the adapter another one")
        for name in set(names) & set(self._entries):
            log.warning("adapter.name_taken", name=name)
        self._hide(names)

    def _hide(self, names: Collection[str]) -> None:
        self._hidden.update(names)
        for name in names:
            self._entries.pop(name, None)

    # -- the folder

    def _list_folder(self) -> None:
        """Adds each subfolder with an adapter_config.json, by its name."""
        try:
            names = [] if self.folder is None else sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return
        for name in names:
            self.find(name)

    def _find_in_folder(self, name: str) -> AdapterEntry | None:
        path = None if name in self._hidden else self._subfolder(name)
        if path is None:
            return None
        entry = self._entries.setdefault(name, AdapterEntry(name, path))
        if name in self._hidden:  # it was removed in the meantime
            self._entries.pop(name, None)
            return None
        return entry

    def _subfolder(self, name: str) -> Path | None:
        """The subfolder of that name, if it is one, holds an adapter and lies in the folder."""
        if self.folder is None or "/" in name or name_problem(name):
            return None
        try:
            path = self.folder / name
            is_inside = path.resolve().parent.is_relative_to(self.folder.resolve())
            return path if is_inside and (path / "adapter_config.json").is_file() else None
        except (OSError, ValueError, RuntimeError):  # a name that is too long, or a loop of links
            return None

    def path_of(self, text: str, name: str = "") -> Path:
        """The path that a client names: in the registry's folder, or what `name` has now or in the settings.

        `name` may be unloaded by now. Raises `Refused`.
        """
        own = self.find(name)
        if own is not None and str(own.path) == text:
            return own.path
        configured = self._configured.get(name)
        if configured is not None and text in (str(configured), str(configured).partition("@")[0]):
            return configured
        if self.folder is None:
            problem = "this server loads adapters from its --lora-dir only, and has none"
            raise Refused(field_text("lora_path", problem))
        try:
            root = self.folder.resolve()
            path = (root / text).resolve()
            is_inside, is_folder = path.is_relative_to(root) and path != root, path.is_dir()
        except (OSError, ValueError, RuntimeError):  # a NUL, a name that is too long, or a loop of links
            raise Refused(field_text("lora_path", "is not a path of this system", repr(text[:256]))) from None
        if not is_inside:
            problem = "must be a folder in the server's --lora-dir"
            raise Refused(field_text("lora_path", problem, repr(text[:256])))
        if not is_folder:
            problem = "no such folder in the server's --lora-dir"
            raise UnknownAdapter(field_text("lora_path", problem, repr(text[:256])), code="not_found")
        return path


def name_problem(name: str) -> str:
    """What is wrong with an adapter's name, and what is right; "" if it may be used."""
    if not name or len(name) > MAX_NAME_CHARS:
        return f"has {len(name)} characters: must have 1 to {MAX_NAME_CHARS}"
    if "," in name or not name.isprintable() or name in (".", ".."):
        return "must be of printable characters, without commas, and neither . nor .."
    return ""


def parse_modules(modules: tuple[str, ...]) -> dict[str, Path]:
    """The adapters of the setting lora_modules: name=path each."""
    found: dict[str, Path] = {}
    for text in modules:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"lora_modules = {text}: must be name=path, as in sql=/adapters/sql")
        if problem := name_problem(name):
            raise ConfigError(f"lora_modules = {text[:300]}: the name {problem}")
        if name in found:
            raise ConfigError(f"lora_modules: two adapters have the name {name}; give each its own")
        found[name] = Path(path)
    return found
