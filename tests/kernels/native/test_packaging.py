"""The platform tag of wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.kernels.native.packaging import manylinux_tag


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ([b"\0GLIBC_2.2.5\0GLIBC_2.14\0GLIBC_2.9\0"], "manylinux_2_14_x86_64"),
        ([b"GLIBC_2.17\0", b"GLIBC_2.34\0GLIBCXX_3.4.99\0"], "manylinux_2_34_x86_64"),
        ([b"\x7fELF"], None),
        ([], None),
    ],
)
def test_a_wheel_needs_the_newest_glibc_of_its_libraries(symbols: list[bytes], tag: str | None, tmp_path: Path) -> None:
    libraries = [tmp_path / f"{i}.so" for i in range(len(symbols))]
    for path, content in zip(libraries, symbols, strict=True):
        path.write_bytes(content)
    assert manylinux_tag(libraries) == tag
