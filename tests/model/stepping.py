"""Drives a Decoder by hand, as the stages do: blocks in no order, prompts in chunks, several sequences in a step."""

from __future__ import annotations

import itertools
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
from millrace.model.decoder.step_inputs import KindTables, StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.kv_kinds import kv_layout


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
    slot: int = 0
    more_blocks: list[Tensor] = field(default_factory=list)  # of the kinds after the first
    num_cached: int = 0
    logits: list[Tensor] = field(default_factory=list)  # of each generated token

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
    cache, order = _made_cache(decoder, sum(blocks_each) + 1, block_size, states)
    tables = [kind.split([*blocks_each, len(kind) - sum(blocks_each)]) for kind in order]
    sequences = [
        Sequence(list(prompt), len(prompt), tables[0][slot], slot, [kind[slot] for kind in tables[1:]])
        for slot, prompt in enumerate(prompts)
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


def _made_cache(
    decoder: Decoder, num_blocks: int, block_size: int, states: RecurrentStates | None
) -> tuple[KVCache, list[Tensor]]:
    """A cache of `num_blocks` blocks or more, and the ids of so many of each kind, in no order."""
    spec, item_size = decoder.spec, decoder.dtype.itemsize
    draw, layout, firsts = torch.Generator().manual_seed(7), None, [0]
    if not spec.has_one_shape:
        num_bytes = 8 * num_blocks * KVCache.bytes_per_block(spec, block_size, decoder.dtype)
        layout = kv_layout(spec, block_size, num_bytes, lambda mixer: item_size * block_size * mixer.cached_numbers)
        slabs = [0, *itertools.accumulate(-(-num_blocks // size) for size in layout.blocks_per_slab)]
        assert slabs[-1] <= layout.num_slabs  # no two kinds have the same memory
        firsts = [first * size for first, size in zip(slabs, layout.blocks_per_slab, strict=False)]
    count = num_blocks if layout is None else layout.num_blocks[0]
    sizes = count, block_size, decoder.dtype, decoder.device
    cache = KVCache(spec, *sizes, decoder.kernels, layout=layout, states=states)
    return cache, [first + torch.randperm(num_blocks, generator=draw, dtype=torch.int32) for first in firsts]


def step_inputs(rows: list[tuple[Sequence, int]], block_size: int) -> StepInputs:
    """The next `count` uncached tokens of each sequence; logits for the last of each."""
    ids, positions, slots, starts = [], [], [], [0]
    kinds = 1 + len(rows[0][0].more_blocks)
    tables = torch.zeros(kinds, len(rows), max(len(sequence.blocks) for sequence, _ in rows), dtype=torch.int32)
    for row, (sequence, count) in enumerate(rows):
        places = torch.arange(sequence.num_cached, sequence.num_cached + count)
        ids.append(torch.tensor(sequence.tokens[sequence.num_cached : sequence.num_cached + count]))
        positions.append(places)
        blocks = torch.stack([sequence.blocks, *sequence.more_blocks])  # [K, M]
        slots.append(blocks[:, places // block_size].long() * block_size + places % block_size)
        starts.append(starts[-1] + count)
        tables[:, row, : len(sequence.blocks)] = blocks
    mappings = torch.cat(slots, 1)
    return StepInputs(
        input_ids=torch.cat(ids),
        positions=torch.cat(positions),
        slot_mapping=mappings[0],
        block_tables=tables[0],
        query_starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor([sequence.num_cached + count for sequence, count in rows], dtype=torch.int32),
        logits_rows=torch.tensor(starts[1:]) - 1,
        num_decode=sum(1 for _, count in rows if count == 1),
        more_kinds=tuple(map(KindTables, mappings[1:], tables[1:])),
        slots=torch.tensor([sequence.slot for sequence, _ in rows]),
    )
