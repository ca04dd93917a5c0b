"""What loading weights takes of the host beside the device's tensors: of numpy, as tensors of torch are not counted."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.model.checkpoint.tensor_shapes import expected_shapes
from millrace.model.decoder.weights import _Loader, load_weights
from millrace.model.demo import WEIGHTS
from millrace.model.families.registry import read_spec
from millrace.model.gguf.blocks import BLOCKS, matrix, unpack

CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


def most_bytes(load: Callable[[], Any]) -> tuple[Any, int]:
    """What is loaded, and the most bytes of numpy beside it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        loaded = load()
        return loaded, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_safetensors_go_to_the_device_without_a_copy_on_the_host(dtype: torch.dtype) -> None:
    spec = read_spec(WEIGHTS)
    load_weights(WEIGHTS, spec, CPU, dtype, load_format="auto")  # imports
    _, most = most_bytes(lambda: load_weights(WEIGHTS, spec, CPU, dtype, load_format="auto"))
    assert most < 500_000 < (WEIGHTS / "model.safetensors").stat().st_size / 4


def test_codes_are_unpacked_to_the_device_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(WEIGHTS)
    shape = expected_shapes(spec)[EMBEDDING]
    num_blocks = math.prod(shape) // 32
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, BLOCKS["Q8_0"].num_bytes), np.uint8)
    blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    dropped: list[tuple[int, int]] = []
    found = matrix("Q8_0", blocks.reshape(-1), shape, lambda begin, end: dropped.append((begin, end)))
    source: Any = SimpleNamespace(packing="Q8_0", grouped=lambda _: found, forget=lambda _: None)
    monkeypatch.setattr("millrace.model.grouped_matrix.UNPACKED_AT_ONCE", 13 * shape[1])
    loader = _Loader(source, spec, CPU, torch.float32, None)
    loaded, most = most_bytes(partial(loader._tensor, EMBEDDING))
    assert np.array_equal(loaded.numpy(), unpack("Q8_0", blocks.reshape(-1), shape))
    assert most < 10 * 13 * shape[1] * 4 + 100_000 < loaded.nbytes / 2
    assert dropped[0][0] == 0 and dropped[-1][1] == blocks.nbytes
