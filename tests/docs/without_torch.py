"""`deploy/package/without-torch.txt`, made from pyproject.toml: the dependencies for models on a CPU."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.docs.generated import ROOT

FILE = Path("deploy") / "package" / "without-torch.txt"
LEFT_OUT = frozenset({"torch", "triton", "transformers"})  # which the native library does not import
HEAD = """\
# What millrace needs on a CPU with the native library: its dependencies but torch, triton and transformers.
# Written by `python -m tests.docs`. Install with
#     pip install -r deploy/package/without-torch.txt && pip install --no-deps -e .
"""


def requirements() -> str:
    """The file's text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["fast"]]
    kept = [line for line in wanted if re.split(r"[^\w.-]", line)[0].lower() not in LEFT_OUT]
    return HEAD + "".join(f"{line}\n" for line in sorted(kept))
