"""Drives a Decoder by hand, as the stages do: blocks in no order, prompts in chunks, several sequences in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.layout.state_layout import StateLayout
from millrace.kernels.tilings.tables import Tilings
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.recurrent import RecurrentStates
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec


def load_decoder(
    root: Path, dtype: torch.dtype = torch.float32, kernels: Any = None, tilings: Tilings | None = None
) -> Decoder:
    """The checkpoint on the CPU, on the PyTorch kernels unless `kernels` are given."""
    config = read_spec(root)
    kernels = kernels or kernel_set.load("torch")
    weights = load_weights(root, config, torch.device("cpu"), dtype, stacks_experts=kernels.name == "triton")
    return Decoder(config, weights, kernels, tilings=tilings)


@dataclass
class Sequence:
    tokens: list[int]
    num_prompt: int
    blocks: Tensor  # [M] i32
    num_cached: int = 0
    logits: list[Tensor] = field(default_factory=list)  # of each generated token
    slot: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def greedy(
    decoder: Decoder, prompts: list[list[int]], num_new: int, block_size: int = 16, chunk: int | None = None
) -> list[Sequence]:
    """Generate `num_new` tokens after each prompt, all side by side, each with at most `chunk` prompt tokens a step."""
    blocks_each = [-(-(len(prompt) + num_new) // block_size) for prompt in prompts]
    each, states = decoder.spec.state_bytes(decoder.dtype.itemsize), None
    if each:
        states = RecurrentStates(decoder.spec, StateLayout(each, len(prompts)), decoder.dtype, decoder.device)
    sizes = sum(blocks_each) + 1, block_size, decoder.dtype, decoder.device
    cache = KVCache(decoder.spec, *sizes, decoder.kernels, states=states)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(7), dtype=torch.int32)
    tables = order.split([*blocks_each, cache.num_blocks - sum(blocks_each)])
    sequences = [
        Sequence(list(prompt), len(prompt), table, slot=slot)
        for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=False))
    ]
    while running := [sequence for sequence in sequences if len(sequence.generated) < num_new]:
        counts = [min(chunk or 1 << 30, len(sequence.tokens) - sequence.num_cached) for sequence in running]
        # Decoding rows come first, as in a real step.
        pairs = sorted(zip(running, counts, strict=True), key=lambda pair: pair[1] != 1)
        logits = decoder.forward(step_inputs(pairs, block_size), cache)
        for row, (sequence, count) in enumerate(pairs):
            sequence.num_cached += count
            if sequence.num_cached == len(sequence.tokens):
                sequence.logits.append(logits[row])
                sequence.tokens.append(int(logits[row].argmax()))
    return sequences


def step_inputs(rows: list[tuple[Sequence, int]], block_size: int) -> StepInputs:
    """The next `count` uncached tokens of each sequence; logits for the last of each."""
    ids, positions, slots, starts = [], [], [], [0]
    tables = torch.zeros(len(rows), max(len(sequence.blocks) for sequence, _ in rows), dtype=torch.int32)
    for row, (sequence, count) in enumerate(rows):
        places = torch.arange(sequence.num_cached, sequence.num_cached + count)
        ids.append(torch.tensor(sequence.tokens[sequence.num_cached : sequence.num_cached + count]))
        positions.append(places)
        slots.append(sequence.blocks[places // block_size].long() * block_size + places % block_size)
        starts.append(starts[-1] + count)
        tables[row, : len(sequence.blocks)] = sequence.blocks
    return StepInputs(
        input_ids=torch.cat(ids),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor([sequence.num_cached + count for sequence, count in rows], dtype=torch.int32),
        logits_rows=torch.tensor(starts[1:]) - 1,
        num_decode=sum(1 for _, count in rows if count == 1),
        slots=torch.tensor([sequence.slot for sequence, _ in rows]),
    )
