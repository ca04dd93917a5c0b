"""Weights of bf16 in 12 bits a number: the same numbers, the same bits of every logit, in less memory."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.model import NativeModel
from tests.counts import FULL
from tests.kernels.native.test_native import AVAILABLE, MODELS, checkpoint, tokens
from tests.kernels.native.test_native_likeliest import Both
from tests.kernels.native.test_native_shares import Still
from tests.kernels.native.test_native_weights import resident_bytes
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

# Which multiply bf16 as such, and so take coded weights: in vectors, and in tile registers.
CODING = [name for name in ("amx", "avx512_bf16") if name in AVAILABLE]
if "avx512" in AVAILABLE and (FULL or not CODING):
    CODING.append("avx512_bf16_emulated")
if "avx512_bf16" in AVAILABLE and (FULL or "amx" not in AVAILABLE):
    CODING.append("amx_emulated")
IN_VECTORS = [name for name in CODING if "amx" not in name]
needs_coding = pytest.mark.skipif(not CODING, reason="nothing here has the instructions that put numbers together")

DOWN = "model.layers.0.mlp.down_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
ONE = 0x3F80  # larger numbers overflow somewhere in a step


def settings(instruction_set: str, num_threads: int = 2) -> dict[str, Any]:
    return {"instruction_set": instruction_set, "num_threads": num_threads, "worth_a_thread": 1}


def coded(made: Checkpoint, instruction_set: str, num_threads: int = 2) -> NativeModel:
    model = made.load("bfloat16", **settings(instruction_set, num_threads))
    model.weights.encode_bf16_12bit()
    return model


def of_all_sizes(shape: tuple[int, ...], most: int = 0x7F7F) -> Array:
    """Numbers whose upper bytes have nothing in common, zeros of both signs among them; bf16's bits `most` at most."""
    draw = np.random.default_rng(0)
    bits = draw.integers(0, most + 1, shape, np.uint16) | draw.integers(0, 2, shape, np.uint16) << np.uint16(15)
    bits[0, :2] = 0x0000, 0x8000
    return (bits.astype(np.uint32) << 16).view(np.float32)


def with_rare(tensor: Array, every: int) -> Array:
    """One number of so many is of any size."""
    draw = np.random.default_rng(1)
    return np.where(draw.integers(0, every, tensor.shape) == 0, of_all_sizes(tensor.shape, ONE), tensor)


def large(every: int = 0) -> Checkpoint:
    """Linears of several panels and many blocks; of whose numbers one of `every` is of any size."""
    made = Checkpoint.random(hidden_size=128, intermediate_size=320, num_heads=4, seed=7)
    if every:
        made.tensors |= {name: with_rare(x, every) for name, x in made.tensors.items() if "proj.weight" in name}
    return made


@needs_coding
@pytest.mark.parametrize("instruction_set", CODING)
@pytest.mark.parametrize("every", [0, 20_000, 1_500])
@pytest.mark.slow
def test_no_bit_of_a_logit_depends_on_whether_weights_are_coded(every: int, instruction_set: str) -> None:
    """1 to 40 rows have tiles of each size; threads share 200 by rows; for rare numbers' sake blocks are kept whole."""
    counts = (*range(1, 41), 200)
    made = large(every)
    plain = made.load("bfloat16", **settings(instruction_set))
    expected = {count: Run(plain).whole(tokens(count)) for count in counts}
    for num_threads in (1, 2, 3):
        model = coded(made, instruction_set, num_threads)
        for count in counts:
            assert np.array_equal(Run(model).whole(tokens(count)), expected[count]), count


@pytest.mark.skipif(not IN_VECTORS, reason="nothing here multiplies bf16 in vectors")
def test_many_who_decode_get_the_same_bits_coded_together_and_apart() -> None:
    """Their keys are fetched beside the products; two threads take half of the rows each."""
    made = large(1_500)
    models = [made.load("bfloat16", **settings(IN_VECTORS[0]), thread_throttle=Still(2)) for _ in range(3)]
    for model in models[1:]:
        model.weights.encode_bf16_12bit()
    models[2].in_library.assume_split(True)
    runs = [Run(model) for model in models]
    for step in range(4):
        parts = {sequence: tokens(70 if step == 0 else 1, sequence) for sequence in range(32)}
        plain, together, apart = (run.step(parts) for run in runs)
        for sequence in parts:
            assert np.array_equal(plain[sequence], together[sequence])
            assert np.array_equal(plain[sequence], apart[sequence])
    assert models[1].in_library.kv_prefetched_bytes > 0 and models[2].in_library.is_split


@needs_coding
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", CODING)
def test_every_kind_of_model_gives_the_same_bits_coded(instruction_set: str, name: str) -> None:
    """Tiles of which there is one, and of which there are several, where k is no whole number of steps in AMX."""
    made = checkpoint(name)
    plain, model = made.load("bfloat16", **settings(instruction_set)), coded(made, instruction_set)
    assert model.weights.num_bytes < plain.weights.num_bytes
    for count in (1, 20, 40, 100):
        assert np.array_equal(Run(model).whole(tokens(count)), Run(plain).whole(tokens(count))), count


@needs_coding
@pytest.mark.parametrize("instruction_set", CODING)
@pytest.mark.parametrize(("hidden_size", "is_tied"), [(256, False), (256, True), (244, False)])
def test_the_likeliest_tokens_and_their_logits_are_those_of_a_head_that_is_not_coded(
    hidden_size: int, is_tied: bool, instruction_set: str
) -> None:
    """By the screen, which multiplies single panels of it, and without. The tied one is read by rows, too.

    It is coded in two stretches, one after the other. 244 are no whole number of steps in AMX.
    """
    made = Checkpoint.random(hidden_size=hidden_size, vocab_size=36_001, is_tied=is_tied)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    made.tensors[name] = with_rare(made.tensors[name] * 0.125, 9_000)
    plain, model = made.load("bfloat16", **settings(instruction_set)), coded(made, instruction_set)
    head = 2 * made.tensors[name].size
    rest = Checkpoint.random(hidden_size=hidden_size, vocab_size=32, is_tied=is_tied)
    plain_rest, coded_rest = rest.load("bfloat16", **settings(instruction_set)), coded(rest, instruction_set)
    saved_elsewhere = plain_rest.weights.num_bytes - coded_rest.weights.num_bytes
    saved = plain.weights.num_bytes - model.weights.num_bytes - saved_elsewhere
    assert 0.15 < saved / head < 0.25
    assert np.array_equal(model.weights.matrix(name, *made.tensors[name].shape), made.tensors[name])
    runs = Both(plain), Both(model)
    for parts in ({0: tokens(1)}, {0: tokens(1), 1: tokens(7)}, {2: tokens(70)}):
        (ids, _, right, _), (same_ids, _, same_right, _) = (run.of(parts) for run in runs)
        assert ids.tolist() == right.tolist() == same_ids.tolist() == same_right.tolist()
        assert runs[1].num_left >= 0, "without the screen"
        first, second = (run.step(parts) for run in runs)
        assert all(np.array_equal(first[sequence], second[sequence]) for sequence in parts)


@needs_coding
@pytest.mark.parametrize("every", [0, 20_000, 1_500])
def test_a_coded_matrix_has_the_numbers_it_was_given(every: int) -> None:
    made = large(every)
    model = coded(made, CODING[0])
    model.weights.encode_bf16_12bit()  # again: they are already
    for name, tensor in made.tensors.items():
        if "proj.weight" in name:
            kept = model.weights.matrix(name, *tensor.shape)
            assert np.array_equal(kept.view(np.uint32), tensor.view(np.uint32)), name


@needs_coding
def test_panels_of_nothing_but_whole_blocks_and_of_zeros_are_coded_with_the_others() -> None:
    """16 rows of gate and of up share a panel, of 20 that there are."""
    made = large()
    strange = made.tensors[GATE].copy()
    strange[:16], strange[16:32], strange[32, -4:] = of_all_sizes((16, 128)), 0.0, of_all_sizes((1, 4))
    made.tensors[GATE] = strange
    model = coded(made, CODING[0])
    more = model.weights.num_bytes - coded(large(), CODING[0]).weights.num_bytes
    assert 0 < more < 48 * 320  # bytes of whole blocks, 33 more or so; 39,000 if the linear were not coded
    assert np.array_equal(model.weights.matrix(GATE, *strange.shape).view(np.uint32), strange.view(np.uint32))


@needs_coding
def test_coded_matrices_take_three_quarters_of_their_memory() -> None:
    plain, model = large().load("bfloat16", **settings(CODING[0])), coded(large(), CODING[0])
    matrices = sum(2 * -(-len(x) // 32) * 32 * x.shape[1] for x in large().tensors.values() if x.ndim == 2)
    left = matrices - (plain.weights.num_bytes - model.weights.num_bytes)
    assert 0.75 < left / matrices < 0.80  # with books and whole blocks
    assert coded(large(1_500), CODING[0]).weights.num_bytes > model.weights.num_bytes  # more of these


@needs_coding
def test_a_matrix_of_numbers_of_all_sizes_stays_as_it_is_among_others_that_are_coded() -> None:
    """What comes after it moves to where it ends."""
    made = large()
    made.tensors[DOWN] = of_all_sizes(made.tensors[DOWN].shape, ONE)
    plain, model = made.load("bfloat16", **settings(CODING[0])), coded(made, CODING[0])
    saved = plain.weights.num_bytes - model.weights.num_bytes
    before = large().load("bfloat16", **settings(CODING[0])).weights.num_bytes
    all_saved = before - coded(large(), CODING[0]).weights.num_bytes
    assert 0 < saved < all_saved
    assert np.array_equal(model.weights.matrix(DOWN, *made.tensors[DOWN].shape), made.tensors[DOWN])
    assert np.array_equal(Run(model).whole(tokens(60)), Run(plain).whole(tokens(60)))


@needs_coding
@pytest.mark.slow
def test_what_coded_weights_no_longer_need_goes_back_to_the_system() -> None:
    made = Checkpoint.random(hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=8, head_dim=64)
    model = made.load("bfloat16", **settings(CODING[0]))
    trim = ctypes.CDLL(None).malloc_trim  # what the C library keeps is not to count
    trim(0)
    before, counted = resident_bytes(), model.weights.num_bytes
    model.weights.encode_bf16_12bit()
    trim(0)
    saved = counted - model.weights.num_bytes
    assert saved > 12 << 20  # of 60 MiB
    assert before - resident_bytes() > saved - (6 << 20)  # large pages


@needs_coding
@pytest.mark.slow
def test_a_matrix_there_is_no_memory_for_stays_as_it_is_and_the_others_are_coded() -> None:
    """The room that the largest ones are coded in is 12 MiB; what is smaller has enough."""
    made = Checkpoint.random(hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=8, head_dim=64)
    plain = made.load("bfloat16", **settings(CODING[0], num_threads=1))
    expected, whole = Run(plain).whole(tokens(20)), coded(made, CODING[0], num_threads=1).weights.num_bytes
    model = made.load("bfloat16", **settings(CODING[0], num_threads=1))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (12 << 20), limits[1]))
    try:
        with pytest.raises(MemoryError, match="no memory to encode"):
            model.weights.encode_bf16_12bit()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert whole < model.weights.num_bytes < plain.weights.num_bytes
    assert np.array_equal(Run(model).whole(tokens(20)), expected)


@pytest.mark.parametrize("name", AVAILABLE)
def test_where_nothing_is_gained_weights_stay_as_they_are(name: str) -> None:
    made = checkpoint("tied")
    kinds: list[tuple[str, str | None]] = [("float32", None), ("bfloat16", "int8"), ("bfloat16", "int4")]
    if name not in ("amx", "avx512_bf16"):
        kinds.append(("bfloat16", None))
    for dtype, quantization in kinds:
        model = made.load(dtype, quantization=quantization, **settings(name))  # type: ignore[arg-type]
        before, logits = model.weights.num_bytes, Run(model).whole(tokens(20))
        model.weights.encode_bf16_12bit()
        assert model.weights.num_bytes == before and np.array_equal(Run(model).whole(tokens(20)), logits)


def test_a_tensor_that_comes_after_coding_is_refused_by_name() -> None:
    made = checkpoint("tied")
    model = made.load("bfloat16", num_threads=1)
    model.weights.encode_bf16_12bit()
    with pytest.raises(RuntimeError, match=DOWN):
        model.weights.set_tensor(DOWN, made.tensors[DOWN])
