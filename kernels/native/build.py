"""Where the native library comes from: the package, where it was built with the wheel, or the machine's own compiler.

What is compiled here is kept in the user's cache folder, by instruction set, compiler flags and source. Imports nothing
of the package: `packaging.py` runs it before there is one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
PREBUILT = Path(__file__).parent / "built"  # in a wheel

COMMON = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread"]
# One rounding for each operation as it is written, so that no build and no inlining changes a bit of a sum.
EXACT = ["-ffp-contract=off", "-fno-math-errno"]
QUIET = ["-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-psabi"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512"]
FLAGS: dict[str, list[str]] = {
    "amx": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
    # What "avx512_bf16" computes with AVX-512 alone, and "amx" without tile registers: for tests.
    "avx512_bf16_emulated": [*AVX512, "-DMILLRACE_EMULATE_BF16_DOT"],
    "amx_emulated": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-DMILLRACE_EMULATE_AMX"],
}


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message holds the end of what it said."""


def library_path(instruction_set: str) -> Path:
    """The library for that instruction set, compiled now if nobody has yet. Raises BuildError.

    Of several processes that do this at once one compiles, and the others wait for it.
    """
    built = PREBUILT / file_name(instruction_set)
    if built.exists():
        return built
    try:
        cached = cache_folder() / file_name(instruction_set)
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with _locked(cached.with_suffix(".lock")):
                if not cached.exists():
                    compile_library(instruction_set, cached)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise BuildError(str(error)) from None
    return cached


def file_name(instruction_set: str) -> str:
    """Of the library, by all that it is made of."""
    digest = hashlib.sha256(" ".join([*COMMON, *EXACT, *FLAGS[instruction_set]]).encode())
    for path in sorted(SOURCE.rglob("*.*")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"millrace-{instruction_set}-{digest.hexdigest()[:16]}.so"


def is_ready(instruction_set: str) -> bool:
    """Whether `library_path` will not have to compile."""
    name = file_name(instruction_set)
    return (PREBUILT / name).exists() or (cache_folder() / name).exists()


def cache_folder() -> Path:
    """MILLRACE_CACHE, or `millrace` in the user's cache folder."""
    asked = os.environ.get("MILLRACE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace"
    return (Path(asked) if asked else base) / "native"


def compile_library(instruction_set: str, target: Path) -> None:
    """Compiles the sources, in parallel, to the file `target`, which appears only when it is whole."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler is on the PATH (c++, g++ or clang++)")
    flags = [*COMMON, *EXACT, *QUIET, *FLAGS[instruction_set], f"-I{SOURCE}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in _units()]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(object)]
            for source, object in zip(_units(), objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=len(commands)) as threads:
            list(threads.map(_run, commands))
        whole = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", "-o", str(whole), *map(str, objects)])
        os.replace(whole, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it if the process ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_compiler() -> str | None:
    """The CXX of the environment, or the first there is."""
    asked = os.environ.get("CXX")
    if asked is not None:
        return shutil.which(asked)
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command[:1])} failed: {error.stderr[-2000:]}") from None


def _units() -> list[Path]:
    """The translation units, of all rooms of `source/`; objects are named by stem, so a stem is used once."""
    return sorted(SOURCE.rglob("*.cpp"))
