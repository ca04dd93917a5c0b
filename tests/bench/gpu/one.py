"""Runs parts in this process: what `python -m tests.bench.gpu` starts, once for each part.

    python -m tests.bench.gpu.one PART... --out lines.jsonl [--seed 0] [--dry] [--tiny]

Each finding is a line of JSON, written when it is found, so that a part that is cut short has told what it knew.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import traceback
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.bench.gpu.part_table import PARTS
from tests.bench.gpu.place import Place


def main() -> int:
    parser = argparse.ArgumentParser(description="Run parts of the GPU's benchmark in this process.")
    parser.add_argument("parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    with options.out.open("w") as out:
        ended = [_run(Lines(out, name), device, options.seed, options.tiny) for name in options.parts]
    return 0 if all(ended) else 1


class Lines:
    """What a part found, a line each."""

    def __init__(self, out: TextIO, part: str) -> None:
        self.part = part
        self.num_wrong = 0
        self._out = out

    def write(self, kind: str, value: Any) -> None:
        self._out.write(json.dumps({"part": self.part, kind: value}) + "\n")
        self._out.flush()

    def complain(self, sentence: str) -> None:
        self.num_wrong += 1
        self.write("wrong", sentence)


def _run(lines: Lines, device: torch.device, seed: int, is_tiny: bool) -> bool:
    """Whether the part ended, and found nothing wrong."""
    place = Place(device, seed, partial(lines.write, "row"), lines.complain, is_tiny)
    lines.write("device", place.name)
    lines.write("versions", versions(device))
    (function,) = (part.function for part in PARTS if part.name == lines.part)
    module, name = function.split(":")
    try:
        getattr(import_module(f".{module}", __package__), name)(place)
    except Exception as error:  # a part that fails does not stop the others
        traceback.print_exc()
        lines.write("failed", f"{type(error).__name__}: {error}")
        return False
    lines.write("packages", loaded_packages())
    lines.write("ended", True)
    return not lines.num_wrong


def versions(device: torch.device) -> dict[str, str | None]:
    """Of all that figures depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = _driver() if device.type == "cuda" else None
    return found


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or None


def loaded_packages() -> list[str]:
    """Installed packages that were imported, by their top-level names."""
    names = {name.partition(".")[0] for name in sys.modules}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return sorted(name for name, file in files.items() if "site-packages" in file)


if __name__ == "__main__":
    sys.exit(main())
