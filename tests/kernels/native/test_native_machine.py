"""Which instruction set is chosen, by what the system says of its processors."""

from __future__ import annotations

from functools import cache

import pytest

from millrace.kernels.native import loading, machine
from millrace.kernels.native.errors import NativeUnavailableError
from millrace.kernels.native.machine import best_first

AVX512 = "avx512f avx512bw avx512vl avx512dq"
BF16 = "avx512_bf16 avx512_vnni"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", f"sse2 fma f16c avx2 {AVX512} {BF16}", ("avx512_bf16", "avx512", "avx2")),
        ("GenuineIntel", f"sse2 fma f16c avx2 {AVX512} {BF16}", ("avx512", "avx512_bf16", "avx2")),
        ("GenuineIntel", f"sse2 fma f16c avx2 {AVX512} {AMX}", ("amx", "avx512", "avx512_bf16", "avx2")),
        ("GenuineIntel", f"sse2 fma f16c avx2 {AVX512}", ("avx512", "avx2")),
        # Without sums of bytes, as only a virtual machine could hide them.
        ("AuthenticAMD", f"sse2 fma f16c avx2 {AVX512} avx512_bf16", ("avx512", "avx2")),
        ("AuthenticAMD", "sse2 fma f16c avx2 avx512f", ("avx2",)),
        ("GenuineIntel", "sse2 avx", ()),
    ],
)
def test_the_first_is_the_fastest_there_is(vendor: str, flags: str, expected: tuple[str, ...]) -> None:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\nbugs\t\t: none\n"
    assert best_first(one + "\n" + one) == expected


def test_a_system_that_says_nothing_of_its_processors_has_none() -> None:
    assert best_first("") == ()


def test_a_processor_with_tile_registers_that_the_system_does_not_grant_goes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine.Path, "read_text", lambda _: "")
    monkeypatch.setattr(machine, "best_first", lambda _: ("amx", "avx512", "avx2"))
    for is_granted, expected in ((False, ("avx512", "avx2")), (True, ("amx", "avx512", "avx2"))):
        monkeypatch.setattr(machine, "ask_for_tiles", lambda is_granted=is_granted: is_granted)
        assert machine.instruction_sets.__wrapped__() == expected


def test_the_best_library_that_can_be_had_is_taken_and_the_one_asked_for_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def load(name: str) -> str:
        tried.append(name)
        if name == "amx":
            raise NativeUnavailableError("the compiler knows no -mamx-tile")
        return f"library of {name}"

    monkeypatch.setattr(machine, "instruction_sets", lambda: ("amx", "avx512", "avx2"))
    monkeypatch.setattr(loading, "_load_once", cache(loading._load_once.__wrapped__))
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.delenv(loading.ENVIRONMENT, raising=False)
    assert [loading.load_best(), loading.load_best()] == [("avx512", "library of avx512")] * 2
    assert tried == ["amx", "avx512"]
    assert loading.load_best("avx2") == ("avx2", "library of avx2")
    with pytest.raises(NativeUnavailableError, match="mamx-tile"):
        loading.load_best("amx")
    monkeypatch.setenv(loading.ENVIRONMENT, "amx")
    with pytest.raises(NativeUnavailableError, match="mamx-tile"):
        loading.load_best()
