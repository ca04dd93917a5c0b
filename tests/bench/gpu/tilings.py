"""The best launch options that a run has found: a file of them, which the engine loads.

    {"format": 1, "cards": {CARD: {KERNEL: {SHAPE: {"options": {...}, "us": 272.1, "shipped_us": 409.0}}}}}

CARD     `torch.cuda.get_device_name()`
KERNEL   decode, extend or product
SHAPE    `shape_key`: names and values, in the order of the functions below; types by their names in torch
options  fields of the launch's options by name; null: PyTorch's own product
us       median of the options; `shipped_us`: of what was launched without the file, in the same run
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.kernels.layout.work_lists import AttentionShape

FORMAT = 1
NAME = "tilings.json"


def shape_key(**sizes: object) -> str:
    """`heads=16 groups=8`: what a launch is known by."""
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in sizes.items())


def attention_key(shape: AttentionShape, num_rows: int) -> str:
    """Of decode for that many sequences, or of extend for that many new tokens."""
    return shape_key(
        heads=shape.num_heads,
        groups=shape.num_groups,
        dim=shape.head_dim,
        dtype=shape.dtype,
        cache=shape.cache_dtype,
        rows=num_rows,
    )


def product_key(kind: str, num_outputs: int, num_inner: int, num_rows: int) -> str:
    """Of `num_rows` rows; `kind` is product, add or activated."""
    return shape_key(kind=kind, outputs=num_outputs, inner=num_inner, rows=num_rows)


class TilingTable:
    """The file of one run, written anew with each entry; there is no moment without a whole file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cards: dict[str, dict[str, dict[str, Any]]] = read(path)["cards"] if path.exists() else {}

    def put(
        self, card: str, kernel: str, shape: str, options: Mapping[str, Any] | None, us: float, shipped_us: float
    ) -> None:
        entry = {"options": None if options is None else dict(options), "us": us, "shipped_us": shipped_us}
        self.cards.setdefault(card, {}).setdefault(kernel, {})[shape] = entry
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps({"format": FORMAT, "cards": self.cards}, indent=1) + "\n")
        os.replace(part, self.path)


def read(path: Path) -> dict[str, Any]:
    """A file of this format. Raises ValueError for another."""
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path}: format {found.get('format')!r}, expected {FORMAT}")
    return found
