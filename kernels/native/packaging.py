"""setuptools commands that build the native library into wheels and editable installs.

A wheel contains the library for every instruction set if the build machine has a compiler. An editable install compiles
it for this machine, so that the first start does not have to. setuptools loads this file by its path (pyproject.toml),
so it imports nothing of the package.
"""

from __future__ import annotations

import platform
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
BUILD: dict[str, Any] = runpy.run_path(str(HERE / "build.py"))
IN_WHEELS = ("amx", "avx512_bf16", "avx512", "avx2")
# Newest GLIBCXX_3.4.N of a platform -> its manylinux version, as auditwheel has them.
CXX_RUNTIMES = {19: (2, 17), 24: (2, 27), 28: (2, 31), 29: (2, 34), 30: (2, 35), 33: (2, 39)}
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_GLIBCXX = re.compile(rb"GLIBCXX_3\.4\.(\d+)")


def is_possible() -> bool:
    """Whether the native step can run on machines like this one, and be compiled here."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return sys.platform == "linux" and is_x86 and BUILD["find_compiler"]() is not None


class BuildWithLibrary(build_py):
    """build_py that also builds the library: for every instruction set beside the package's files.

    In an editable install: for this machine's best instruction set, in the user's cache folder. Without a compiler it
    builds no library.
    """

    def run(self) -> None:
        super().run()
        if not is_possible():
            return
        if self.editable_mode:
            available = runpy.run_path(str(HERE / "machine.py"))["instruction_sets"]()
            any(self._try(name, BUILD["library_path"]) for name in available)  # the first that compiles
            return
        folder = _built_folder(self.build_lib)
        folder.mkdir(parents=True, exist_ok=True)
        for name in IN_WHEELS:
            self._try(name, lambda name: BUILD["compile_library"](name, folder / BUILD["file_name"](name)))

    def _try(self, name: str, compile_library: Callable[[str], object]) -> bool:
        try:
            compile_library(name)
        except BUILD["BuildError"] as error:  # an old compiler lacks the newest instructions
            print(f"native library for {name} left out: {error}", file=sys.stderr)
            return False
        return True


class PlatformWheel(bdist_wheel):
    """bdist_wheel that tags a wheel with the library as manylinux, for any Python 3 on x86-64."""

    def finalize_options(self) -> None:
        if is_possible():
            vars(self.distribution)["has_ext_modules"] = lambda: (
                True
            )  # so the package is installed beside compiled modules
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        if self.root_is_pure:
            return tag
        built = _built_folder(self.get_finalized_command("build_py").build_lib).glob("*.so")
        return "py3", "none", manylinux_tag(built) or tag[2]


def manylinux_tag(libraries: Iterable[Path]) -> str | None:
    """The platform tag of a wheel with these libraries: the oldest manylinux that has the symbols they need.

    None if there is no library, or one needs a C++ runtime newer than every known platform's. Source: PEP 600.
    """
    contents = b"\0".join(path.read_bytes() for path in libraries)
    versions = [(int(major), int(minor)) for major, minor in _GLIBC.findall(contents)]
    for needed in {int(minor) for minor in _GLIBCXX.findall(contents)}:
        known = [version for minor, version in CXX_RUNTIMES.items() if minor >= needed]
        if not known:
            return None
        versions.append(min(known))
    return "manylinux_{}_{}_x86_64".format(*max(versions)) if versions else None


def _built_folder(build_lib: str) -> Path:
    return Path(build_lib) / "millrace" / "kernels" / "native" / "built"
