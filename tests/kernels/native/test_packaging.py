"""Building the native library, and the platform tag of wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.kernels.native import build
from millrace.kernels.native.packaging import manylinux_tag


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ([b"\0GLIBC_2.2.5\0GLIBC_2.14\0GLIBC_2.9\0"], "manylinux_2_14_x86_64"),
        ([b"GLIBC_2.17\0", b"GLIBC_2.34\0GLIBCXX_3.4\0GLIBCXX_3.4.29\0"], "manylinux_2_34_x86_64"),
        ([b"GLIBC_2.34\0GLIBCXX_3.4.30\0"], "manylinux_2_35_x86_64"),
        ([b"GLIBC_2.34\0GLIBCXX_3.4.99\0"], None),
        ([b"\x7fELF"], None),
        ([], None),
    ],
)
def test_a_wheel_is_tagged_with_the_oldest_platform_that_has_its_symbols(
    symbols: list[bytes], tag: str | None, tmp_path: Path
) -> None:
    libraries = [tmp_path / f"{i}.so" for i in range(len(symbols))]
    for path, content in zip(libraries, symbols, strict=True):
        path.write_bytes(content)
    assert manylinux_tag(libraries) == tag


REFUSING = """#!/bin/sh
# As clang: flags of a unit must be those with which the headers that it includes were read.
flags=$(printf '%s ' "$@" | tr ' ' '\\n' | grep '^-m')
out=$(printf '%s\\n' "$@" | grep -A1 '^-o$' | tail -1)
headers=$(printf '%s\\n' "$@" | grep -A1 '^-include$' | tail -1)
if [ -n "$headers" ] && [ "$flags" != "$(cat "$headers.gch")" ]; then
    echo "headers.h.gch was compiled with other target features" >&2
    exit 1
fi
printf '%s' "$flags" > "$out"
"""


def test_a_compiler_that_compares_the_flags_of_kept_headers_builds_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "clang++"
    compiler.write_text(REFUSING)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build.compile_library("avx512", tmp_path / "library.so")
    assert (tmp_path / "library.so").exists()
