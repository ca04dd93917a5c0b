"""Adapters in device slots against the table that the host groups, in one step of several adapters and the base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from millrace.kernels import kernel_set
from millrace.model.decoder.adapted_kernels import PRODUCTS, with_slots
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.lora_linear import LoraTable, with_adapters
from millrace.model.decoder.lora_slots import LoraSlots
from millrace.model.decoder.weights import load_weights
from millrace.model.errors import AdapterError
from millrace.model.families.registry import read_spec
from millrace.model.lora.adapter import Adapter, AdapterSlice, read_adapter
from tests.model.lora.peft_formats import Writer, save_adapter, write_base
from tests.model.stepping import Sequence, step_inputs

LENGTHS, SLOTS = (3, 5, 1, 4), (2, 0, 1, 3)  # of sequences: tokens and adapter slots
ENDS = ("q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "query_key_value", "qkv_proj", "gate_up_proj", "fc_in")
ENDS = (*ENDS, "dense_h_to_4h", "dense_4h_to_h", "up_proj")


def written(base: Path, folder: Path, rank: int, ends: tuple[str, ...]) -> Path:
    writer = Writer(load_file(base / "model.safetensors"), np.random.default_rng(rank))
    paths = writer.modules(*ends)
    assert paths
    writer.lora(*paths, rank=rank)
    return save_adapter(
        folder, writer.tensors, r=rank, target_modules=sorted({path.rpartition(".")[2] for path in paths})
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt_neox"])
def test_rows_of_slots_are_those_of_adapters_that_the_host_groups(family: str, tmp_path: Path) -> None:
    """Linears of one and of several modules, rows that are interleaved, feeds without a gate, and norms behind."""
    base = write_base(family, tmp_path / "base")
    spec, device = read_spec(base), torch.device("cpu")
    weights = load_weights(base, spec, device, torch.float32)
    kernels = kernel_set.load("torch")
    slots = LoraSlots(spec, weights, kernel_set.load_lora("torch"), 3, 8, 8)
    table = LoraTable(3, device)
    for number, (rank, ends) in enumerate(((3, ENDS[:6]), (8, ENDS), (1, ENDS[5:])), 1):
        path = written(base, tmp_path / f"adapter{number}", rank, ends)
        for place in (slots, table):
            adapter = read_adapter(path, spec, "float32")
            place.load(number, adapter if isinstance(place, LoraTable) else place.prepare(adapter))
    found = []
    for decoder in (
        Decoder(spec, weights, with_slots(kernels, slots), adapters=slots),
        Decoder(spec, with_adapters(weights, table), kernels, adapters=table),
        Decoder(spec, weights, kernels),
    ):
        cache = KVCache(spec, 8, 16, torch.float32, device)
        rows = [
            (Sequence([*range(9, 9 + length)], length, torch.tensor([row], dtype=torch.int32)), length)
            for row, length in enumerate(LENGTHS)
        ]
        if decoder.adapters is not None:
            decoder.adapters.begin_step(np.repeat(np.array(SLOTS), LENGTHS))
            assert not decoder.adapters.is_idle
        found.append(decoder.forward(step_inputs(rows, 16), cache))
    ours, theirs, without = found
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for row, slot in enumerate(SLOTS):
        assert torch.allclose(ours[row], without[row], rtol=1e-4, atol=1e-4) == (slot == 0)


def test_steps_without_adapters_call_what_they_call_without_slots(tmp_path: Path) -> None:
    base = write_base("llama", tmp_path)
    spec = read_spec(base)
    weights = load_weights(base, spec, torch.device("cpu"), torch.float32)
    kernels = kernel_set.load("torch")
    slots = LoraSlots(spec, weights, kernel_set.load_lora("torch"), 1, 4, 8)
    adapted, x = with_slots(kernels, slots), torch.randn(2, spec.hidden_size)
    for slots_of_step in (None, np.array([0, 0])):
        slots.begin_step(slots_of_step)
        assert slots.is_idle == (slots_of_step is None)
        for layer in weights.layers:
            got = adapted.gated_linear(x, None, layer.gate_up, "silu")
            assert torch.equal(got, kernels.gated_linear(x, None, layer.gate_up, "silu"))
    for name in set(dir(kernel_set.KernelSet)) - set(PRODUCTS):
        if not name.startswith("_"):
            assert getattr(adapted, name) is getattr(kernels, name), name


def test_modules_of_one_matrix_add_their_ranks_and_too_many_are_refused(tmp_path: Path) -> None:
    base = write_base("llama", tmp_path)
    spec = read_spec(base)
    weights = load_weights(base, spec, torch.device("cpu"), torch.float32)
    slots = LoraSlots(spec, weights, kernel_set.load_lora("torch"), 1, 4, 8)
    hidden = spec.hidden_size
    draw = np.random.default_rng(0)

    def part(start: int, rows: int, rank: int) -> AdapterSlice:
        a, b = (draw.standard_normal(shape).astype(np.float32) for shape in ((rank, hidden), (rows, rank)))
        return AdapterSlice(start, a, b)

    halves = (part(0, 10, 2), part(10, hidden - 10, 2))
    for name, slices in (("before", (part(0, 5, 3),)), ("halves", halves)):
        slots.load(1, slots.prepare(Adapter(name, None, "float32", {(1, "output"): slices})))
    slots.begin_step(np.array([1]))
    output = weights.layers[1].output
    found = slots.of(output)
    assert found is not None and found[0].ranks.tolist() == [[4]]
    x, residual = torch.randn(1, found[0].num_inner), torch.zeros(1, hidden)
    got = with_slots(kernel_set.load("torch"), slots).linear_add(residual.clone(), x, output)
    want = output(x).numpy() + np.concatenate([(x.numpy() @ one.a.T) @ one.b.T for one in halves], axis=1)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)
    many = Adapter("many", None, "float32", {(1, "output"): (*halves, part(5, 3, 1))})
    with pytest.raises(AdapterError, match=r"'many': its ranks add up to 5 .* takes up to 4: start it with .*rank 5"):
        slots.prepare(many)
