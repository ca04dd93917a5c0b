"""The platform tag of wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

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
