"""Keys and values that are fetched a layer ahead, beside products: which, how many, when none. Nothing that is computed
depends on it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType
from tests.kernels.native_oracle import Array, Checkpoint, Run
from tests.kernels.test_native import DTYPES, SETS

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

SOURCE = """
#include "kept.h"
#include "upcoming.h"
using namespace millrace;
#define EXPORT extern "C" __attribute__((visibility("default")))
int64_t millrace::now_ns() { return 0; }
// What is fetched beside `count` tiles of a product, of `num_pairs` each: [count] of [place, bytes].
EXPORT void fetch(const int64_t* places, int64_t num, int64_t tile_bytes, int64_t most_bytes, int64_t num_pairs,
                  int64_t count, int64_t* out) {
    const uint16_t* layer = nullptr;
    Upcoming upcoming;
    upcoming.begin(layer, places, places + num, tile_bytes, most_bytes, num_pairs * count);
    for (int64_t i = 0; i < count; i++, out += 2) {
        Beside beside = upcoming.beside(num_pairs);
        out[0] = beside.place - reinterpret_cast<const char*>(layer), out[1] = beside.times * Upcoming::FETCHED;
        if (beside.times && (beside.times - 1) * beside.apart >= num_pairs) out[1] = -1;  // some come too late
    }
}
EXPORT int64_t kept(const char* data, int64_t num_bytes, int64_t assumed) {
    Kept kept;
    kept.assume(assumed);
    return kept.num_bytes(data, num_bytes);
}
"""

TILE_BYTES = 2048
NUM_PAIRS = 288  # of a tile of a product: 576 numbers


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("upcoming")
    (folder / "upcoming.cpp").write_text(SOURCE)
    flags = [*build.COMMON, *build.EXACT, *build.QUIET, *build.FLAGS["avx2"]]
    command = [str(build.find_compiler()), *flags, f"-I{build.SOURCE}", "-shared", "upcoming.cpp", "-o", "upcoming.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "upcoming.so"))
    library.kept.restype = ctypes.c_int64
    return library


def fetch(compiled: ctypes.CDLL, starts: list[int], count: int, most_bytes: int = 1 << 40) -> list[tuple[int, int]]:
    """(first byte, bytes) of what is fetched beside each of `count` tiles of a product; `starts`: bytes where tiles of
    keys and values begin."""
    places = np.array(starts, np.int64) // 2  # of two bytes
    out = np.zeros((count, 2), np.int64)
    numbers = (len(places), TILE_BYTES, most_bytes, NUM_PAIRS, count)
    compiled.fetch(ctypes.c_void_p(places.ctypes.data), *map(ctypes.c_int64, numbers), ctypes.c_void_p(out.ctypes.data))
    return [(int(place), int(size)) for place, size in out]


def lines(pieces: list[tuple[int, int]]) -> list[int]:
    return [place + at for place, size in pieces for at in range(0, size, 64)]


SCATTERED = [TILE_BYTES * place for place in np.random.default_rng(0).permutation(60)]
RUNS = [TILE_BYTES * place for place in (*range(7, 23), *range(40, 41), *range(3, 5), *range(60, 101))]


@pytest.mark.parametrize("starts", [RUNS, SCATTERED], ids=["runs", "scattered"])
@pytest.mark.parametrize("count", [30, 100, 1000])
def test_all_lines_are_fetched_once_and_in_the_order_in_which_they_are_read(
    compiled: ctypes.CDLL, starts: list[int], count: int
) -> None:
    wanted = [start + at for start in starts for at in range(0, TILE_BYTES, 64)]
    found = lines(fetch(compiled, starts, count))
    assert found == wanted[: len(found)]
    if count > 30:  # of 60 tiles that lie apart, beside 30 tiles of a product at most 30
        assert len(found) == len(wanted)


def test_beside_each_tile_about_as_much_is_fetched_and_all_of_it_before_the_last_ones(compiled: ctypes.CDLL) -> None:
    pieces = fetch(compiled, [TILE_BYTES * place for place in range(100)], 100)
    sizes = [size for _, size in pieces]
    last = max(i for i, size in enumerate(sizes) if size)
    assert 75 <= last <= 85 and sum(sizes) == 100 * TILE_BYTES
    assert max(sizes) - min(sizes[:last]) <= 128  # two lines


def test_no_more_is_fetched_than_is_kept(compiled: ctypes.CDLL) -> None:
    found = lines(fetch(compiled, RUNS, 100, most_bytes=10_000))
    assert len(found) * 64 == 10_000 // 128 * 128


def test_what_does_not_fit_beside_the_products_is_left_out(compiled: ctypes.CDLL) -> None:
    pieces = fetch(compiled, [TILE_BYTES * place for place in range(10_000)], 20)
    assert all(size == 128 * NUM_PAIRS for _, size in pieces)  # two lines for each pair


def test_where_there_is_nothing_nothing_is_fetched(compiled: ctypes.CDLL) -> None:
    assert lines(fetch(compiled, [], 10)) == [] == lines(fetch(compiled, RUNS, 10, most_bytes=100))


def test_weights_that_a_cache_may_hold_as_a_whole_are_not_measured(compiled: ctypes.CDLL) -> None:
    data = np.zeros(1 << 20, np.uint8)
    assert compiled.kept(ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.size), ctypes.c_int64(-1)) == 0


NUM_SEQUENCES, NUM_CONTEXT = 30, 40  # several tiles of rows


def run(model: NativeModel, num_kept: int, block_size: int = 16, num_context: int = NUM_CONTEXT) -> tuple[Array, int]:
    """Logits of two steps with decoding rows, one of them with a prompt, too; and how many bytes they have fetched."""
    model.assume_kept(num_kept)
    going = Run(model, block_size=block_size)
    draw = np.random.default_rng(5)
    vocabulary = model.shape.vocab_size
    prompts = {s: draw.integers(0, vocabulary, num_context + s).tolist() for s in range(NUM_SEQUENCES)}
    for sequence, ids in prompts.items():
        going.step({sequence: ids})
    given, fetched = [], 0
    for turn in range(2):
        parts = {s: [(7 * s + turn) % vocabulary] for s in range(NUM_SEQUENCES)}
        if turn:
            parts[NUM_SEQUENCES] = draw.integers(0, vocabulary, 23).tolist()
        given += list(going.step(parts).values())
        fetched += model.num_bytes_beside
    return np.concatenate(given), fetched


def load(dtype: DType = "bfloat16", **settings: Any) -> NativeModel:
    sizes = {name: settings.pop(name) for name in ("sliding_windows", "num_layers") if name in settings}
    return Checkpoint.random(**sizes).load(dtype, worth_a_thread=1, **{"num_threads": 2, **settings})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_have_the_same_bits_whatever_is_fetched(instruction_set: str, dtype: DType) -> None:
    model = load(dtype, instruction_set=instruction_set)
    without, none = run(model, 0)
    ahead, some = run(model, 1 << 24)
    assert np.array_equal(without, ahead) and none == 0
    is_in_tile_registers = "amx" in instruction_set and dtype == "bfloat16"
    assert (some > 0) == (not is_in_tile_registers)


@pytest.mark.parametrize(
    "settings",
    [{"cache_dtype": "int8"}, {"quantization": "int8"}, {"num_threads": 1}, {"num_threads": 3}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_so_they_have_with_int8_and_any_number_of_threads(settings: dict[str, Any]) -> None:
    model = load(**settings)
    without, none = run(model, 0)
    ahead, some = run(model, 1 << 24)
    assert np.array_equal(without, ahead) and none == 0 < some


def test_layers_with_windows_fetch_what_these_see() -> None:
    whole, cut = load(num_layers=2, sliding_windows=(None, None)), load(num_layers=2, sliding_windows=(None, 16))
    without, _ = run(cut, 0)
    ahead, some = run(cut, 1 << 24)
    _, more = run(whole, 1 << 24)
    assert np.array_equal(without, ahead) and 0 < some < more


def test_what_is_fetched_of_a_layer_is_half_of_what_is_kept() -> None:
    model = load(num_layers=2)
    _, many = run(model, 1 << 24)
    _, few = run(model, 8192)
    assert 0 < few <= 2 * 4096 < many  # two steps


def test_one_tile_of_rows_and_blocks_smaller_than_tiles_fetch_nothing() -> None:
    model = load()
    assert run(model, 1 << 24, block_size=8)[1] == 0
    model.assume_kept(1 << 24)
    going = Run(model)
    going.step({s: list(range(5)) for s in range(3)})
    going.step({s: [1] for s in range(3)})
    assert model.num_bytes_beside == 0


def test_weights_of_int4_whose_sums_are_many_fetch_nothing() -> None:
    assert run(load(quantization="int4"), 1 << 24)[1] == 0


def test_a_machine_is_measured_where_nothing_is_assumed() -> None:
    """Of so small a model all weights may be in the cache."""
    model = load()
    run(model, 1 << 24)
    assert run(model, -1)[1] == 0
