"""A decoder by the Triton kernels, in their interpreter, over a cache in fp8: what torch makes of the same.

Run by `test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest tests/model/interpreted_fp8_cache.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.triton import launch as triton_launch
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.kv_scales import measured_scales
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from tests.bench.gpu.place import TINY

CPU, FP8, BLOCK_SIZE = torch.device("cpu"), torch.float8_e4m3fn, 4


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def decoder(folder: Path, name: kernel_set.BackendName) -> Decoder:
    (folder / "config.json").write_text(json.dumps(TINY))
    config = read_spec(folder)
    weights = load_weights(folder, config, CPU, torch.float32, load_format="dummy")
    return Decoder(config, weights, kernel_set.load(name), max_positions=64)


def step(model: Decoder, cache: KVCache, ids: list[int], length: int) -> Tensor:
    """Logits of the last tokens of a sequence that comes to `length`, in blocks 1, 2, ..."""
    positions = torch.arange(length - len(ids), length)
    tables = torch.arange(1, cache.num_blocks, dtype=torch.int32)[None]
    inputs = StepInputs(
        input_ids=torch.tensor(ids),
        positions=positions,
        slot_mapping=positions + BLOCK_SIZE,
        block_tables=tables,
        query_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
        lengths=torch.tensor([length], dtype=torch.int32),
        logits_rows=torch.arange(len(ids)),
        num_decode=int(len(ids) == 1),
    )
    return model.forward(inputs, cache)


def test_a_prompt_and_the_steps_after_it_are_torchs(tmp_path: Path) -> None:
    """Where rounding to e4m3 carries into the exponent, the interpreter loses the carry, so some of the keys and values
    that a step writes differ; where none does, its logits must not."""
    models = [decoder(tmp_path, name) for name in ("triton", "torch")]
    scales = measured_scales(models[1])
    assert torch.equal(measured_scales(models[0]), scales)
    caches = [KVCache(model.spec, 6, BLOCK_SIZE, FP8, CPU, scales=scales) for model in models]
    kept = [cache.data.view(torch.uint8) for cache in caches]

    def both(ids: list[int], length: int) -> tuple[Tensor, Tensor]:
        ours, theirs = (step(model, cache, ids, length) for model, cache in zip(models, caches, strict=True))
        return ours, theirs

    ours, theirs = both([7, 250, 3, 99, 14, 6, 28], 7)
    assert 0 < (kept[0] != kept[1]).sum() < 0.05 * kept[0].count_nonzero()
    assert (ours - theirs).square().mean().sqrt() < 0.05 * theirs.std()
    kept[0].copy_(kept[1])
    num_alike = 0
    for token in range(40, 52):
        ours, theirs = both([token], 8)
        if torch.equal(*kept):
            num_alike += 1
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        kept[0].copy_(kept[1])
    assert num_alike > 1
