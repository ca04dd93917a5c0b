"""The versions and hashes of what the CPU image installs: `python -m tests.deploy.kube --lock` writes them."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from tests.deploy.kube import tools

LOCK = tools.ROOT / "deploy" / "containers" / "requirements-cpu.txt"
LEFT_OUT = ("torch", "triton", "transformers")  # 2 GB, which the native library does not import
HEAD = """\
# What millrace needs on a CPU with the native library: its dependencies but torch, triton and transformers, and uvloop.
# For Python 3.11 on x86-64. Written by `python -m tests.deploy.kube --lock`; install with --require-hashes --no-deps.
"""


def canonical(name: str) -> str:
    """`Huggingface_Hub` -> `huggingface-hub`: the form in which names of packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> list[str]:
    """The requirements of the image, as pyproject.toml has them."""
    project = tomllib.loads((tools.ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["fast"]]
    return [name for name in names if canonical(re.split(r"[^\w.-]", name)[0]) not in LEFT_OUT]


def locked() -> dict[str, str]:
    """The package -> its version, in the file."""
    lines = LOCK.read_text().splitlines()
    found = (re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[:1] != "#")
    return {match[1]: match[2] for match in found if match is not None}


def write() -> None:
    """Asks PyPI, and no other index that this machine may use, for the newest versions that fit together."""
    python = tools.FOLDER / "venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "pip", "--isolated", "install", "--index-url", "https://pypi.org/simple", "--dry-run"]
        options = ["--quiet", "--ignore-installed", "--only-binary", ":all:", "--report", report, "--target", folder]
        subprocess.run([*command, *options, *wanted()], check=True)
        found = json.loads(report.read_text())["install"]
    lines = (
        f"{canonical(one['metadata']['name'])}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in found
    )
    LOCK.write_text(HEAD + "".join(sorted(lines)))
