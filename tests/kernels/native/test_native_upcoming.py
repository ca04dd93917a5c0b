"""Keys and values that are fetched a layer ahead, beside products: which, how many, when none. Nothing that is computed
depends on it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

SOURCE = """
#include "machine/cache_probe.h"
#include "attention/kv_prefetch.h"
using namespace millrace;
#define EXPORT extern "C" __attribute__((visibility("default")))
// A clock by which each second look at it comes as late as it is told: [num] of `late`, then never.
const int64_t* late = nullptr;
int64_t num_late = 0, num_looks = 0, now = 0;
int64_t millrace::now_ns() {
    int64_t read = num_looks++;
    if (read % 2 && read / 2 < num_late) now += late[read / 2];
    return now;
}
// What is fetched beside `count` tiles of a product, of `num_pairs` each: [count] of [place, bytes].
EXPORT void fetch(const int64_t* places, int64_t num, int64_t tile_bytes, int64_t most_bytes, int64_t num_pairs,
                  int64_t count, int64_t* out) {
    const uint16_t* layer = nullptr;
    KvPrefetcher prefetcher;
    prefetcher.begin(layer, places, places + num, tile_bytes, most_bytes, num_pairs * count);
    for (int64_t i = 0; i < count; i++, out += 2) {
        KvPrefetch prefetch = prefetcher.next(num_pairs);
        out[0] = prefetch.address - reinterpret_cast<const char*>(layer);
        out[1] = prefetch.num_prefetches * KvPrefetcher::PREFETCH_BYTES;
        bool is_late = prefetch.num_prefetches && (prefetch.num_prefetches - 1) * prefetch.interval >= num_pairs;
        if (is_late) out[1] = -1;  // some come too late
    }
}
// What is kept at a request at [num_asked] of `asked`, and how often it was read for that by then: of [2] each.
EXPORT void keep(const char* data, int64_t num_bytes, const int64_t* times, int64_t num, const int64_t* asked,
                 int64_t num_asked, int64_t* out) {
    late = times, num_late = num, num_looks = 0;
    CacheProbe probe;
    for (int64_t i = 0; i < num_asked; i++, out += 2)
        out[0] = probe.retained_bytes(data, num_bytes, asked[i]), out[1] = num_looks / 2;
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
    return ctypes.CDLL(str(folder / "upcoming.so"))


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


def test_what_lies_between_tiles_is_fetched_with_them_where_it_is_a_line_at_most(compiled: ctypes.CDLL) -> None:
    near, far = ([(TILE_BYTES + apart) * place for place in range(40)] for apart in (32, 96))
    pieces = [piece for piece in fetch(compiled, near, 20) if piece[1]]
    assert all(a + size >= b >= a for (a, size), (b, _) in zip(pieces, pieces[1:], strict=False))
    assert len(pieces) < 20 and pieces[-1][0] + pieces[-1][1] >= 39 * (TILE_BYTES + 32)
    apart = fetch(compiled, far, 200)
    assert sorted({place for place, size in apart if size} & set(far)) == far


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


MIB = 1 << 20


def keep(
    compiled: ctypes.CDLL, *times: int, asked: Sequence[int] = (0,), num_bytes: int = 84 * MIB
) -> list[tuple[int, int]]:
    """(bytes that are kept, how often something was read for that by then) at each request, where reading
    takes so many times."""
    data, late, at = np.zeros(num_bytes, np.uint8), np.array(times, np.int64), np.array(asked, np.int64)
    out = np.zeros((len(at), 2), np.int64)
    places = ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(num_bytes)
    lists = [(ctypes.c_void_p(each.ctypes.data), ctypes.c_int64(len(each))) for each in (late, at)]
    compiled.keep(*places, *lists[0], *lists[1], ctypes.c_void_p(out.ctypes.data))
    return [(int(kept), int(count)) for kept, count in out]


SLOW, FAST = (100, 90), (100, 50)  # a first reading and one right after it


@pytest.mark.parametrize(("looks", "kept"), [([FAST], 16), ([SLOW, FAST], 8), ([SLOW, SLOW, FAST], 4), ([SLOW] * 3, 0)])
@pytest.mark.parametrize("num_bytes", [84 * MIB, 48 * MIB])
def test_a_cache_keeps_the_most_that_is_read_faster_the_second_time(
    compiled: ctypes.CDLL, num_bytes: int, looks: list[tuple[int, int]], kept: int
) -> None:
    times = [time for look in looks for time in 3 * look]
    assert keep(compiled, *times, num_bytes=num_bytes) == [(kept * MIB, 6 * len(looks))]


def test_one_quiet_look_of_three_is_enough(compiled: ctypes.CDLL) -> None:
    assert keep(compiled, 700, 600, 100, 800, 500, 50)[0][0] == 16 * MIB
    assert keep(compiled, 700, 100, 100, 800, 500, 90, *3 * SLOW, *3 * SLOW)[0][0] == 0


def test_what_is_kept_is_measured_again_after_so_many_times_as_long_and_later_where_it_was_none(
    compiled: ctypes.CDLL,
) -> None:
    while_kept, while_none = 2000 * 3 * sum(FAST), 10_000 * 9 * sum(SLOW)
    asked = [5, while_kept + 4, while_kept + 5]
    assert keep(compiled, *3 * FAST, *9 * SLOW, asked=asked) == [(16 * MIB, 6), (16 * MIB, 6), (0, 24)]
    asked = [5, while_none + 4, while_none + 5]
    assert keep(compiled, *9 * SLOW, *3 * FAST, asked=asked) == [(0, 18), (0, 18), (16 * MIB, 24)]


def test_a_measurement_that_took_long_is_made_again_after_two_minutes_all_the_same(compiled: ctypes.CDLL) -> None:
    asked = [0, 120_000_000_000 - 1, 120_000_000_000]
    long = 1_000_000_000, 500_000_000
    assert keep(compiled, *3 * long, *9 * SLOW, asked=asked) == [(16 * MIB, 6), (16 * MIB, 6), (0, 24)]


def test_weights_that_a_cache_may_hold_as_a_whole_are_not_measured(compiled: ctypes.CDLL) -> None:
    assert keep(compiled, *3 * FAST, num_bytes=48 * MIB - 1) == [(0, 0)]


NUM_SEQUENCES, NUM_CONTEXT = 16, 40  # two tiles of rows and more
PLENTY = 1 << 24  # bytes that are kept
IN_VECTORS = next((name for name in AVAILABLE if name != "amx"), None)
# Products long enough that all is fetched in time.
LONG: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 4096}
TILES_OF_16 = 16 * 32 * 2  # bytes of a tile: 16 keys by 32 numbers of bf16


def run(
    model: NativeModel,
    num_kept: int,
    block_size: int = 16,
    has_prompt: bool = True,
    num_context: int = NUM_CONTEXT,
) -> tuple[Array, list[int]]:
    """Logits of three steps of decoding rows, in two of them beside a prompt, of which no logits are asked for in the
    last one; and how many bytes each has fetched."""
    model.in_library.assume_retained(num_kept)
    going = Run(model, num_blocks=2 * NUM_SEQUENCES * -(-(num_context + 30) // block_size), block_size=block_size)
    draw = np.random.default_rng(5)
    vocabulary = model.shape.vocab_size
    for sequence in range(NUM_SEQUENCES):
        going.step({sequence: draw.integers(0, vocabulary, num_context).tolist()})
    given, fetched = [], []
    for turn in range(3):
        parts = {s: [(7 * s + turn) % vocabulary] for s in range(NUM_SEQUENCES)}
        asked = {s: [0] for s in parts} if turn == 2 else None
        if turn and has_prompt:
            parts[NUM_SEQUENCES] = draw.integers(0, vocabulary, 23).tolist()
        given += list(going.step(parts, asked).values())
        fetched.append(model.in_library.kv_prefetched_bytes)
    return np.concatenate(given), fetched


def load(dtype: DType = "bfloat16", sizes: dict[str, Any] | None = None, **settings: Any) -> NativeModel:
    given = {"worth_a_thread": 1, "num_threads": 2, "instruction_set": IN_VECTORS}
    return Checkpoint.random(**(sizes or {})).load(dtype, **(given | settings))


def check_same_bits(model: NativeModel, num_context: int = NUM_CONTEXT) -> None:
    without, none = run(model, 0, num_context=num_context)
    ahead, some = run(model, PLENTY, num_context=num_context)
    assert np.array_equal(without, ahead)
    assert none == [0, 0, 0] and all(some)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_have_the_same_bits_whatever_is_fetched(instruction_set: str, dtype: DType) -> None:
    model = load(dtype, {"hidden_size": 256, "intermediate_size": 264}, instruction_set=instruction_set)
    if "amx" in instruction_set and dtype == "bfloat16":
        assert run(model, PLENTY)[1] == [0, 0, 0], "nothing is fetched in tile registers"
    else:
        check_same_bits(model)


@pytest.mark.parametrize(
    "settings",
    [{"cache_dtype": "int8"}, {"quantization": "int8"}, {"num_threads": 1}, {"num_threads": 3}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_so_they_have_with_int8_and_any_number_of_threads(settings: dict[str, Any]) -> None:
    check_same_bits(load(**settings))


@pytest.mark.parametrize("sizes", [{"head_dim": 24, "rotary_dim": 24}, {"num_layers": 3}], ids=str)
def test_so_they_have_with_padded_heads_and_more_layers(sizes: dict[str, Any]) -> None:
    check_same_bits(load(sizes=sizes))


@pytest.mark.parametrize(
    "settings",
    [{}, {"cache_dtype": "int8"}, {"num_threads": 1}, {"sizes": {"num_layers": 2, "sliding_windows": (None, 300)}}],
    ids=str,
)
def test_so_they_have_where_a_chunk_s_values_wait_for_the_next_one_s_keys(settings: dict[str, Any]) -> None:
    """As they do with nothing fetched, of 600 keys."""
    check_same_bits(load(**settings), num_context=600)


@pytest.mark.parametrize("lateness", [1, 5, 1000])
def test_so_they_have_where_a_thread_comes_late(lateness: int) -> None:
    model = load()
    without, _ = run(model, 0)
    model._library.millrace_set_join_delay(model._model, lateness)
    ahead, some = run(model, PLENTY)
    assert np.array_equal(without, ahead) and all(some)


@pytest.mark.parametrize("window", [None, 16])
def test_all_is_fetched_that_decoding_rows_see_in_layers_after_the_first(window: int | None) -> None:
    model = load(sizes={**LONG, "num_layers": 3, "sliding_windows": (None, None, window)}, num_threads=1)
    _, fetched = run(model, PLENTY, block_size=128, has_prompt=False)
    for turn, num_bytes in enumerate(fetched):
        length = NUM_CONTEXT + turn + 1
        num_tiles = sum(-(-length // 16) - max(0, length - (seen or length)) // 16 for seen in (None, window))
        assert num_bytes == NUM_SEQUENCES * 2 * 2 * num_tiles * TILES_OF_16  # of two heads keys and values


def test_what_is_fetched_of_a_layer_is_half_of_what_is_kept() -> None:
    _, fetched = run(load(sizes={**LONG, "num_layers": 3}, num_threads=1), 65536, has_prompt=False)
    assert fetched == [65536, 65536, 65536]  # of two layers


def test_one_tile_of_rows_and_blocks_smaller_than_tiles_fetch_nothing() -> None:
    model = load()
    assert run(model, PLENTY, block_size=8)[1] == [0, 0, 0]
    model.in_library.assume_retained(PLENTY)
    going = Run(model)
    going.step({s: list(range(5)) for s in range(3)})
    going.step({s: [1] for s in range(3)})
    assert model.in_library.kv_prefetched_bytes == 0


def test_one_layer_has_none_to_fetch_for() -> None:
    assert run(load(sizes={"num_layers": 1}), PLENTY)[1] == [0, 0, 0]


def test_weights_of_int4_whose_sums_are_many_fetch_nothing() -> None:
    assert run(load(quantization="int4"), PLENTY)[1] == [0, 0, 0]


def test_of_a_model_that_a_cache_may_hold_nothing_is_fetched() -> None:
    model = load()
    run(model, PLENTY)
    assert run(model, -1)[1] == [0, 0, 0]
