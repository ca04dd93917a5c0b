"""Which instruction set is chosen, by what the system says of its processors."""

from __future__ import annotations

import pytest

from millrace.kernels.native.machine import best_first

AVX512 = "avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", f"sse2 fma avx2 {AVX512} avx512_bf16", ("avx512_bf16", "avx512", "avx2")),
        ("GenuineIntel", f"sse2 fma avx2 {AVX512} avx512_bf16", ("avx512", "avx512_bf16", "avx2")),
        ("GenuineIntel", f"sse2 fma avx2 {AVX512}", ("avx512", "avx2")),
        ("AuthenticAMD", "sse2 fma avx2 avx512f", ("avx2",)),
        ("GenuineIntel", "sse2 avx", ()),
    ],
)
def test_the_first_is_the_fastest_there_is(vendor: str, flags: str, expected: tuple[str, ...]) -> None:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\nbugs\t\t: none\n"
    assert best_first(one + "\n" + one) == expected


def test_a_system_that_says_nothing_of_its_processors_has_none() -> None:
    assert best_first("") == ()
