"""Finds the native library in the wheel, or compiles it.

Compiled libraries are cached in the user's cache folder, by instruction set, compiler flags and source. Imports nothing
of the package, because `packaging.py` runs this file before the package is installed.
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
# One rounding per operation as written, so that neither the compiler nor inlining changes a bit of a sum.
EXACT = ["-ffp-contract=off", "-fno-math-errno"]
QUIET = ["-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-psabi"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512"]
# Headers that most units read, which takes a second each time: they are read once, and kept as the compiler has them.
HEADERS = ("immintrin.h", "algorithm", "array", "cmath", "functional", "map", "memory", "mutex", "optional", "vector")
# More flags of one file, in the builds for AVX-512. Its functions run only where the processor has the instructions.
BYTE_DOTS = "super_sums_vnni", ["-mavx512vnni"]
FLAGS: dict[str, list[str]] = {
    "amx": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # For tests: "avx512_bf16" with AVX-512 alone, and "amx" without tile registers.
    "avx512_bf16_emulated": [*AVX512, "-DMILLRACE_EMULATE_BF16_DOT"],
    "amx_emulated": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-DMILLRACE_EMULATE_AMX"],
}


class BuildError(RuntimeError):
    """No compiler, or it failed; the message holds the end of its output."""


def library_path(instruction_set: str) -> Path:
    """Path of the library for an instruction set; compiles it if necessary. Raises BuildError.

    Of several processes at once, one compiles and the others wait.
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
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise BuildError(str(error)) from None
    return cached


def file_name(instruction_set: str) -> str:
    """File name of the library: instruction set, and a hash of the flags and sources."""
    digest = hashlib.sha256(" ".join([*COMMON, *EXACT, *FLAGS[instruction_set], *BYTE_DOTS[1]]).encode())
    for path in sorted(SOURCE.rglob("*.*")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"millrace-{instruction_set}-{digest.hexdigest()[:16]}.so"


def is_ready(instruction_set: str) -> bool:
    """Whether `library_path` returns without compiling."""
    name = file_name(instruction_set)
    if (PREBUILT / name).exists():
        return True
    try:
        return (cache_folder() / name).exists()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return False


def cache_folder() -> Path:
    """MILLRACE_CACHE, or `millrace` in the user's cache folder."""
    cache_home = os.environ.get("MILLRACE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace"
    return (Path(cache_home) if cache_home else base) / "native"


def compile_library(instruction_set: str, target: Path) -> None:
    """Compiles the sources in parallel; `target` appears only once it is complete. Raises BuildError."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler on the PATH: install c++, g++ or clang++, or set CXX")
    flags = [*COMMON, *EXACT, *QUIET, *FLAGS[instruction_set], f"-I{SOURCE}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        headers = Path(folder) / "headers.h"
        headers.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
        _run([compiler, *flags, "-x", "c++-header", str(headers), "-o", f"{headers}.gch"])
        more = BYTE_DOTS[1] if "-mavx512f" in flags else []
        objects, commands = [], []
        for source in _units():
            objects.append(f"{folder}/{source.stem}.o")
            # NOTE: clang refuses headers that were read with other flags.
            own = more if source.stem == BYTE_DOTS[0] and more else ["-include", str(headers)]
            commands.append([compiler, *flags, *own, "-c", str(source), "-o", objects[-1]])
        _run_all(commands)
        whole = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", "-o", str(whole), *objects])
        os.replace(whole, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock of one process at a time; the system releases it if the process ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_compiler() -> str | None:
    """The compiler that CXX names, or the first of c++, g++ and clang++ on the PATH."""
    if compiler := os.environ.get("CXX"):
        return shutil.which(compiler)
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _run_all(commands: list[list[str]]) -> None:
    """Runs the commands, one for each core at once, or one after the other where the system allows no threads."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        try:
            results = threads.map(_run, commands)  # starts the threads
        except RuntimeError:
            threads.shutdown(cancel_futures=True)
            results = map(_run, commands)
        list(results)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command[:1])} failed: {error.stderr[-2000:]}") from None


def _units() -> list[Path]:
    """The translation units in all folders of `source/`. Objects are named by stem, so stems must be unique.

    The shortest come first: they have all code of a type made from headers, which takes longest.
    """
    return sorted(SOURCE.rglob("*.cpp"), key=lambda path: (path.stat().st_size, path))
