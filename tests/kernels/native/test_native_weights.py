"""A checkpoint's tensors on their way into a native model: what is packed, what is refused, when memory is taken."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.errors import NonFiniteError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import Quantization
from tests.kernels.native.test_native import AVAILABLE, DTYPES, MODELS, SETS, checkpoint, load, tokens
from tests.kernels.native.test_native_likeliest import LARGE
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import small_shape

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_numbers_of_bfloat16_are_packed_as_the_same_ones_of_float32_are(name: str, instruction_set: str) -> None:
    """Those that are kept as they are take a way of their own, four rows at a time."""
    made = checkpoint(name)
    bits = {each: (tensor.view(np.uint32) >> 16).astype(np.uint16) for each, tensor in made.tensors.items()}
    narrow = replace(made, tensors=bits).load(
        "bfloat16", instruction_set=instruction_set, num_threads=2, worth_a_thread=1
    )
    for each, tensor in made.tensors.items():
        if tensor.ndim == 2 and (made.shape.is_tied or each != "model.embed_tokens.weight"):
            assert np.array_equal(narrow.weights.matrix(each, *tensor.shape), tensor), each
    wanted = Run(load(name, "bfloat16", instruction_set)).whole(tokens(50))
    assert np.array_equal(Run(narrow).whole(tokens(50)), wanted)


@pytest.mark.parametrize("row", [0, 3, 43, 44, 45])  # the last two are not four
@pytest.mark.parametrize("number", [0x7F80, 0xFF80, 0x7F81, 0xFFFF])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(row: int, number: int) -> None:
    model, name = checkpoint("odd sizes").load("bfloat16", num_threads=1), "model.layers.1.self_attn.o_proj.weight"
    for column in (0, 7, 181):
        numbers = np.full((46, 182), 0x7F7F, np.uint16)  # the largest that is finite
        model.weights.set_tensor(name, numbers)
        numbers[row, column] = number
        with pytest.raises(NonFiniteError, match="o_proj"):
            model.weights.set_tensor(name, numbers)


def test_a_tensor_with_nan_or_one_that_overflows_bfloat16_is_refused_by_name() -> None:
    made = Checkpoint.random()
    for dtype, value in (("float32", np.nan), ("bfloat16", 3.4e38)):
        model = NativeModel(made.shape, dtype, made.ropes, made.num_positions, num_threads=1)  # type: ignore[arg-type]
        bad = made.tensors["model.layers.1.mlp.up_proj.weight"].copy()
        bad[71, 5] = value
        with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*" + dtype):
            model.weights.set_tensor("model.layers.1.mlp.up_proj.weight", bad)


def test_half_precision_tensors_are_converted() -> None:
    made = Checkpoint.random()
    models = [NativeModel(made.shape, "float32", made.ropes, made.num_positions, num_threads=1) for _ in range(3)]
    for name, tensor in made.tensors.items():
        half = tensor.astype(np.float16)
        models[0].weights.set_tensor(name, half)
        models[1].weights.set_tensor(name, half.view(np.uint16), dtype="float16")
        models[2].weights.set_tensor(name, half.astype(np.float32))
    results = [Run(model).whole(tokens(10)) for model in models]
    assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[2])


def test_weights_are_counted_as_they_are_packed() -> None:
    made = Checkpoint.random()
    half, wide = (made.load(dtype, num_threads=1).weights.num_bytes for dtype in DTYPES[::-1])  # type: ignore[arg-type]
    matrices = sum(tensor.size for tensor in made.tensors.values() if tensor.ndim == 2)
    padding = made.shape.hidden_size * (-70 % 32 + made.shape.num_layers * 2 * (-72 % 16))
    norms = 4 * sum(tensor.size for tensor in made.tensors.values() if tensor.ndim == 1)
    assert half == 2 * (matrices + padding) + norms and wide == 4 * (matrices + padding) + norms


def test_a_model_takes_the_memory_of_its_weights_with_the_first_of_them() -> None:
    """Before loading, the caller compares what it needs with what is free."""
    made = Checkpoint.random()
    shape = small_shape(hidden_size=1024, intermediate_size=4096)  # 26 million numbers in the layers
    tensor = np.ones((4096, 1024), np.float32)
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have given back is not to be taken from there
    before = resident_bytes()
    model = NativeModel(shape, "bfloat16", made.ropes, made.num_positions, num_threads=1)
    assert resident_bytes() - before < 10 << 20
    model.weights.set_tensor("model.layers.1.mlp.up_proj.weight", tensor)
    assert resident_bytes() - before > 40 << 20


def test_weights_live_without_their_model_and_are_freed_with_the_last_reference() -> None:
    made = Checkpoint.random()
    shape = small_shape(hidden_size=1024, intermediate_size=4096)
    name, tensor = "model.layers.1.mlp.up_proj.weight", np.ones((4096, 1024), np.float32)
    model = NativeModel(shape, "bfloat16", made.ropes, made.num_positions, num_threads=2)
    weights = model.weights
    weights.set_tensor(name, tensor)
    del model
    gc.collect()
    assert np.array_equal(weights.matrix(name, *tensor.shape), tensor)
    before = resident_bytes()
    del weights
    assert before - resident_bytes() > 40 << 20  # at once: nothing of a model refers to itself


def test_tensors_of_a_map_are_packed_in_one_call_as_each_is_by_itself(tmp_path: Path) -> None:
    made = Checkpoint.random()
    one_by_one = made.load("bfloat16", num_threads=1)
    mapped = {}
    for name, tensor in made.tensors.items():
        tensor.tofile(tmp_path / name)
        mapped[name] = np.memmap(tmp_path / name, np.float32, "c", shape=tensor.shape)
    at_once = NativeModel(made.shape, "bfloat16", made.ropes, made.num_positions, num_threads=1)
    at_once.weights.set_mapped_tensors(mapped)
    assert np.array_equal(Run(at_once).whole(tokens(50)), Run(one_by_one).whole(tokens(50)))


def test_a_map_has_no_pages_of_a_tensor_that_is_packed(tmp_path: Path) -> None:
    made, file = Checkpoint.random(), tmp_path / "tensors"
    file.write_bytes(bytes(2 * 4096 * 1024))
    model = NativeModel(
        small_shape(hidden_size=1024, intermediate_size=4096), "bfloat16", made.ropes, made.num_positions, num_threads=1
    )
    mapped = np.memmap(file, np.uint16, "c", shape=(4096, 1024))
    assert mapped.sum() == 0 and _pages_of(file) == 2048
    model.weights.set_mapped_tensors({"model.layers.1.mlp.up_proj.weight": mapped})
    assert _pages_of(file) == 0 and mapped.sum() == 0


def _pages_of(file: Path) -> int:
    """Of its map, those in memory."""
    described = Path("/proc/self/smaps").read_text().split(str(file))[1]
    return int(described.split("Rss:")[1].split()[0]) // 4


def test_of_a_maps_tensors_the_one_that_is_not_finite_is_named(tmp_path: Path) -> None:
    made = Checkpoint.random()
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)]
    mapped = {}
    for name in names:
        made.tensors[name].tofile(tmp_path / name)
        mapped[name] = np.memmap(tmp_path / name, np.float32, "c", shape=made.tensors[name].shape)
    mapped[names[1]][3, 2] = np.inf
    model = NativeModel(made.shape, "bfloat16", made.ropes, made.num_positions, num_threads=1)
    with pytest.raises(NonFiniteError, match=re.escape(names[1])):
        model.weights.set_mapped_tensors(mapped)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_tensors_that_are_set_by_rows_are_those_that_are_set_whole(quantization: Quantization, is_tied: bool) -> None:
    vocab_size = 300 if quantization else LARGE  # so that there is a screen
    made = Checkpoint.random(is_tied=is_tied, vocab_size=vocab_size)
    settings: Any = {"quantization": quantization, "num_threads": 2}
    model = NativeModel(made.shape, "bfloat16", made.ropes, made.num_positions, **settings)
    for name, tensor in made.tensors.items():
        rows = 1 + len(tensor) // 9 if tensor.ndim == 2 else len(tensor)
        for first in range(0, len(tensor), rows):
            model.weights.set_tensor_rows(name, first, tensor[first : first + rows])
    whole = made.load("bfloat16", **settings)
    assert model.weights.screen_bytes == whole.weights.screen_bytes
    assert (model.weights.screen_bytes > 0) == (quantization is None)
    assert np.array_equal(Run(model).whole(tokens(10)), Run(whole).whole(tokens(10)))
