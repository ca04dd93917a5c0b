"""Tables of tilings: measured launch options of kernels, by card and shape, as JSON.

    {
      "format": 1,
      "cards": {
        "NVIDIA H200": {                      the name that the driver gives: torch.cuda.get_device_name()
          "measured": "2026-12-01, millrace 0.1.0, torch 2.11.0, triton 3.6.0",
          "product": [
            {
              "shape": {"num_outputs": 4096, "num_inner": 1024, "kind": "plain", "num_rows": 4, "dtype": "bfloat16"},
              "options": {"form": "vector", "block_m": 4, "block_n": 4, "block_k": 1024, "fuses_norm": true},
              "us": 3.1                       optional, as are other keys beside shape and options: notes
            }
          ],
          "decode": [
            {
              "shape": {"group": 2, "head_dim": 128, "num_rows": 256, "cache_dtype": "float8_e4m3fn"},
              "options": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "occupancy": 3}
            }
          ],
          "extend": [],
          "experts": [
            {
              "shape": {"num_experts": 64, "num_outputs": 1024, "num_inner": 2048, "num_pairs": 8},
              "options": {"block_m": 16, "block_n": 32, "block_k": 128, "num_stages": 4}
            }
          ]
        }
      }
    }

Each kernel of `KERNELS` has a list. Shape and options are the fields of its two dataclasses; a field with a default may
be left out. A file may hold several cards, and lacks a kernel or a shape where nothing was measured. A tiling of
attention that does not fit the card is not taken, with a line in the log.

The setting `tilings` chooses: `auto` = the shipped table, and predictions for what it lacks; `off` = the library's
products and the kernels' own defaults; a path = that file before the shipped table. `write_table` writes such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .attention import AttentionKind, StepShape, StepTiling
from .experts import ExpertShape, ExpertTiling, usual_tiling
from .predicted import BYTES_PER_S, predicted_forms
from .products import SHARED_BYTES, DtypeName, FormsByRows, ProductForm, ProductKind, ProductShape, why_library

FORMAT = 1
SHIPPED = Path(__file__).with_name("shipped.json")
KERNELS: dict[str, tuple[type[Any], type[Any]]] = {  # shape and options
    "product": (ProductShape, ProductForm),
    "decode": (StepShape, StepTiling),
    "extend": (StepShape, StepTiling),
    "experts": (ExpertShape, ExpertTiling),
}

Entries = Mapping[str, Mapping[Any, Any]]  # kernel -> shape -> options


class TilingsError(ValueError):
    """A table cannot be used; the message names file, card, entry, value, and what is right."""


@dataclass(frozen=True, slots=True, eq=False)
class Tilings:
    """The launch options for one card."""

    card: str
    source: str  # where the measured options are from: "shipped", a path, or "none: ..."
    entries: Entries = field(default_factory=dict)
    num_processors: int = 132  # of the card, for predictions
    is_on: bool = True  # False: the library's products
    shared_bytes: int = SHARED_BYTES  # of a block, for predictions
    bytes_per_s: float = BYTES_PER_S  # of the card's memory, for predictions

    def find(self, kernel: str, shape: object) -> Any:
        """The measured options of a kernel of `KERNELS` for exactly this shape; None = nothing was measured."""
        return self.entries.get(kernel, {}).get(shape)

    def product_forms(
        self, num_outputs: int, num_inner: int, kind: ProductKind, dtype: DtypeName
    ) -> tuple[FormsByRows, str]:
        """The forms of a product by rows, and why: `measured`, `predicted`, or the reason for the library."""
        if not self.is_on:
            return (), "tilings = off"
        found = [
            (shape.num_rows, form)
            for shape, form in self.entries.get("product", {}).items()
            if (shape.num_outputs, shape.num_inner, shape.kind, shape.dtype) == (num_outputs, num_inner, kind, dtype)
        ]
        if found:
            return tuple(sorted(found, key=lambda pair: pair[0])), "measured"
        if (reason := why_library(num_outputs, num_inner, dtype)) is not None:
            return (), reason
        sizes = (self.num_processors, self.shared_bytes, self.bytes_per_s)
        forms = predicted_forms(num_outputs, num_inner, kind, dtype, *sizes)
        return forms, "predicted" if forms else "predicted to be no slower"

    def too_large(self, block_bytes: int) -> list[str]:
        """Measured tilings of attention that take more than a block's shared memory: defaults are taken instead."""
        return [
            f"{kind}: {options} for {shape}"
            for kind in ("decode", "extend")
            for shape, options in self.entries.get(kind, {}).items()
            if options.least_bytes(shape) > block_bytes
        ]

    def attention(self, kind: AttentionKind, shape: StepShape) -> StepTiling | None:
        """The measured tiling of this shape for at least as many rows, else for the most; None = none was measured."""
        if not self.is_on:
            return None
        found = {
            each.num_rows: tiling
            for each, tiling in self.entries.get(kind, {}).items()
            if replace(each, num_rows=shape.num_rows) == shape
        }
        return found[min((rows for rows in found if rows >= shape.num_rows), default=max(found))] if found else None

    def experts(self, shape: ExpertShape, *, is_fixed: bool = False) -> ExpertTiling:
        """The measured options of a grouped product for at least as many pairs, else for the most, else the usual.

        With `is_fixed` the usual ones that are for any number of pairs.
        """
        found = {
            each.num_pairs: tiling
            for each, tiling in self.entries.get("experts", {}).items()
            if replace(each, num_pairs=shape.num_pairs) == shape
        }
        if is_fixed or not found or not self.is_on:
            return usual_tiling(shape, self.shared_bytes, is_fixed=is_fixed)
        best: ExpertTiling = found[min((pairs for pairs in found if pairs >= shape.num_pairs), default=max(found))]
        return best


def load_tilings(
    setting: str,
    card: str,
    num_processors: int,
    shared_bytes: int = SHARED_BYTES,
    bytes_per_s: float = BYTES_PER_S,
) -> Tilings:
    """The options for `card` by the setting `tilings`: `auto`, `off`, or the path of a table.

    What is known of the card besides is for predictions: multiprocessors, shared memory of a block, the memory's rate.

    Raises TilingsError for a table that cannot be read or holds a wrong value, for whichever card.
    """
    if setting == "off":
        return Tilings(card, "none: tilings = off", {}, num_processors, is_on=False)
    sources = ["shipped"] if setting == "auto" else [setting, "shipped"]
    found: dict[str, dict[Any, Any]] = {}
    used = []
    for source in reversed(sources):  # so that the file replaces what is shipped
        cards = read_table(SHIPPED if source == "shipped" else Path(source))
        if card in cards:
            used.append(source)
            for kernel, entries in cards[card].items():
                found[kernel] = found.get(kernel, {}) | dict(entries)
        elif source != "shipped":
            raise TilingsError(
                f"tilings = {source}: has no options for the card {card!r}, but for {', '.join(cards) or 'none'}; "
                "measure them with `python -m tests.bench.gpu.timed_run`, or use auto"
            )
    used_of = ", ".join(reversed(used)) or f"none: nothing was measured on {card}"
    return Tilings(card, used_of, found, num_processors, shared_bytes=shared_bytes, bytes_per_s=bytes_per_s)


def read_table(path: Path) -> dict[str, Entries]:
    """The checked options of a table by card. Raises TilingsError."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TilingsError(f"tilings = {path}: cannot be read as JSON: {error}") from None
    return parse_table(content, str(path))


def parse_table(content: object, name: str) -> dict[str, Entries]:
    """The checked options of a table's content by card; `name` is the file's, for errors."""
    table = _mapping(content, f"tilings = {name}")
    if table.get("format") != FORMAT:
        raise TilingsError(f"tilings = {name}: format = {table.get('format')!r}: must be {FORMAT}; measure it again")
    cards = _mapping(table.get("cards"), f"tilings = {name}: cards")
    return {card: _parse_card(kernels, f"tilings = {name}: {card}") for card, kernels in cards.items()}


def write_table(
    path: Path, card: str, measured: str, entries: Mapping[str, Sequence[tuple[object, object, float]]]
) -> None:
    """Writes the options of one card as a table; those of other cards and other kernels in the file stay.

    `measured` says when and with which versions. `entries` has triples for each kernel: shape, options, and the
    microseconds measured. Raises TilingsError if the file there is no table, or if an entry is wrong.
    """
    content: dict[str, Any] = {"format": FORMAT, "cards": {}}
    if path.exists():
        read_table(path)
        content = json.loads(path.read_text("utf-8"))
    content["cards"][card] = (
        content["cards"].get(card, {})
        | {"measured": measured}
        | {
            kernel: [
                {"shape": _plain(shape), "options": _plain(options), "us": round(us, 3)}
                for shape, options, us in triples
            ]
            for kernel, triples in entries.items()
        }
    )
    parse_table(content, str(path))
    whole = path.with_name(path.name + ".part")  # so that a run that is cut leaves the old table
    whole.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    whole.replace(path)


# -- checks


def _parse_card(content: object, where: str) -> dict[str, dict[Any, Any]]:
    kernels = _mapping(content, where)
    found: dict[str, dict[Any, Any]] = {}
    for kernel, entries in kernels.items():
        if kernel == "measured":
            continue
        if kernel not in KERNELS:
            raise TilingsError(f"{where}: kernel {kernel!r}: must be one of {', '.join(KERNELS)}")
        if not isinstance(entries, list):
            raise TilingsError(f"{where}: {kernel}: must be a list of entries")
        found[kernel] = {}
        for index, entry in enumerate(entries):
            shape, options = _parse_entry(kernel, entry, f"{where}: {kernel}[{index}]")
            if shape in found[kernel]:
                raise TilingsError(f"{where}: {kernel}[{index}]: a second entry for {shape}")
            found[kernel][shape] = options
    return found


def _parse_entry(kernel: str, content: object, where: str) -> tuple[Any, Any]:
    entry = _mapping(content, where)
    shape_class, options_class = KERNELS[kernel]
    shape = _parse(shape_class, entry.get("shape"), f"{where}: shape")
    options = _parse(options_class, entry.get("options"), f"{where}: options")
    if check := getattr(options, "check", None):
        try:
            check(shape)
        except ValueError as error:
            raise TilingsError(f"{where}: {error}") from None
    return shape, options


def _parse(made: type[Any], content: object, where: str) -> Any:
    """An object of the dataclass `made`, whose fields are numbers, flags, names of a Literal, or None."""
    values = _mapping(content, where)
    kinds = _kinds(made)
    if unknown := values.keys() - kinds.keys():
        raise TilingsError(f"{where}: {', '.join(sorted(unknown))}: must be among {', '.join(kinds)}")
    needed = {each.name for each in fields(made) if each.default is MISSING}
    if missing := needed - values.keys():
        raise TilingsError(f"{where}: lacks {', '.join(sorted(missing))}")
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise TilingsError(f"{where}: {name} = {value!r}: must be {_described(kinds[name])}")
    try:
        return made(**values)
    except ValueError as error:
        raise TilingsError(f"{where}: {error}") from None


def _kinds(made: type[Any]) -> dict[str, Any]:
    return get_type_hints(made)


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind) and not isinstance(value, bool)
    return type(value) is kind  # NOTE: True is an int for isinstance


def _described(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(map(_described, get_args(kind)))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    names = {int: "an integer", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, str(kind))


def _mapping(content: object, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TilingsError(f"{where}: must be an object with names, got {type(content).__name__}")
    return content


def _plain(value: object) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(value)}  # type: ignore[arg-type]
    return {name: each for name, each in asdict(value).items() if each != defaults[name]}  # type: ignore[call-overload]
