"""What the native step's vectors compute, number by number, against float64."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.kernels.native import build, machine

AVAILABLE = machine.instruction_sets()
pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

SOURCE = """
#include "machine/vector_math.h"
using namespace millrace;
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void exp_of(const float* x, long count, float* out) {
    for (long i = 0; i < count; i += W) store(out + i, exp(load(x + i)));
}
EXPORT void expm1_of(const float* x, long count, float* out) {
    for (long i = 0; i < count; i += W) {
        F one[] = {load(x + i)};
        expm1_all(one);
        store(out + i, one[0]);
    }
}
EXPORT void tanh_of(const float* x, long count, float* out) {
    for (long i = 0; i < count; i += W) store(out + i, tanh(load(x + i)));
}
EXPORT void tail_of(const float* x, long count, float* out) {
    for (long i = 0; i < count; i += W) {
        F one[] = {load(x + i)};
        normal_tail_all(one);
        store(out + i, one[0]);
    }
}
EXPORT void fold(const float* x, float* out) { out[0] = sum_of(load(x)), out[1] = max_of(load(x)), out[2] = W; }
"""

Floats = NDArray[np.float32]


@pytest.fixture(scope="module", params=[name for name in AVAILABLE if name in ("avx512", "avx2")])
def vectors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("simd")
    (folder / "simd.cpp").write_text(SOURCE)
    flags = [*build.COMMON, *build.EXACT, *build.QUIET, *build.FLAGS[request.param]]
    command = [str(build.find_compiler()), *flags, f"-I{build.SOURCE}", "-shared", "simd.cpp", "-o", "simd.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "simd.so"))


def function(vectors: ctypes.CDLL, name: str) -> Callable[[Floats], Floats]:
    def of(x: Floats) -> Floats:
        padded = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
        out = np.empty_like(padded)
        places = ctypes.c_void_p(padded.ctypes.data), ctypes.c_long(len(out)), ctypes.c_void_p(out.ctypes.data)
        vectors[f"{name}_of"](*places)
        return out[: len(x)]

    return of


def of_any_size(*ranges: tuple[float, float]) -> Floats:
    """Numbers whose logarithms are spread evenly, of both signs, and 0."""
    sizes = np.concatenate([np.geomspace(*each, 20_000) for each in ranges])
    return np.concatenate([-sizes, [0], sizes]).astype(np.float32)


def units_off(ours: Floats, exact: NDArray[np.float64]) -> float:
    """The largest error in units of the last place."""
    return float((np.abs(ours - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_e_to_the_x_is_within_two_units_in_the_last_place_at_every_exponent(vectors: ctypes.CDLL) -> None:
    draw = np.random.default_rng(0)
    fractions = np.concatenate([[0, 1, (1 << 23) - 1], draw.integers(0, 1 << 23, 253)])
    bits = (np.arange(512)[:, None] << 23) + fractions  # all signs and exponents
    x = bits.astype(np.uint32).view(np.float32).ravel()
    near_0, normal = x[np.abs(x) < 1e-9], x[(x >= np.float32(-87.3)) & (x <= 88)]
    exp = function(vectors, "exp")
    exact = np.exp(normal.astype(np.float64))
    assert (np.abs(exp(normal) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert (exp(near_0) == 1).all()
    assert (exp(x[x < np.float32(-87.3)]) == 0).all() and (exp(x[np.isnan(x)]) == 0).all()
    edges = np.array([-87.3, np.nextafter(np.float32(-87.3), np.float32(-88)), -np.inf, 88], np.float32)
    assert (exp(edges) > 0).tolist() == [True, False, False, True] and np.isfinite(exp(edges)).all()


def test_e_to_the_x_minus_1_is_exact_to_three_units_down_to_the_smallest_numbers(vectors: ctypes.CDLL) -> None:
    x = of_any_size((1e-30, 80.0))
    x = x[x <= 0]
    assert units_off(function(vectors, "expm1")(x), np.expm1(x.astype(np.float64))) <= 3


def test_tanh_is_exact_to_four_units_and_keeps_what_is_not_finite(vectors: ctypes.CDLL) -> None:
    x, tanh = of_any_size((1e-30, 80.0), (0.01, 10.0)), function(vectors, "tanh")
    assert units_off(tanh(x), np.tanh(x.astype(np.float64))) <= 4
    assert np.isnan(tanh(np.array([np.nan, np.inf, -np.inf], np.float32))).all()
    assert tanh(np.array([1e38, -1e38], np.float32)).tolist() == [1, -1]


def test_the_tail_of_the_normal_distribution_is_exact_enough_for_gelu(vectors: ctypes.CDLL) -> None:
    x, tail = of_any_size((1e-6, 1e4), (0.5, 8.0)), function(vectors, "tail")
    exact = np.array([math.erfc(abs(each) / math.sqrt(2)) / 2 for each in x.tolist()])
    assert (np.abs(tail(x) - exact) * np.maximum(np.abs(x), 1) <= 1.5e-7).all()
    assert np.array_equal(tail(-x), tail(x)) and tail(np.array([50.0, 1e30, np.inf], np.float32)).tolist() == [0] * 3


def test_e_to_the_x_has_the_same_bits_in_every_lane(vectors: ctypes.CDLL) -> None:
    x = np.random.default_rng(1).uniform(-90, 88, 4096).astype(np.float32)
    exp = function(vectors, "exp")
    assert all(np.array_equal(np.roll(exp(np.roll(x, by)), -by), exp(x)) for by in range(1, 16))


def test_a_vector_is_summed_half_by_half_and_its_largest_number_is_found_in_every_lane(vectors: ctypes.CDLL) -> None:
    x, out = np.random.default_rng(2).standard_normal(16).astype(np.float32), np.empty(3, np.float32)
    for _ in range(16):
        x = np.roll(x, 1)
        vectors.fold(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        width = int(out[2])
        folded = x[:width]
        while len(folded) > 1:
            folded = folded[: len(folded) // 2] + folded[len(folded) // 2 :]
        assert out[0] == folded[0] and out[1] == x[:width].max()
