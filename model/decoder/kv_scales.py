"""Scales of an 8-bit KV cache: keys and values are divided by one number for each layer and key/value head.

e4m3 holds numbers up to 448 with three fraction bits, so scaling loses only numbers that are too large or too small.
The largest numbers of one step of random tokens give the range of each head. Scales are powers of two, so dividing by
them is exact and kernels that round differently get the same result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .decoder import Decoder
from .kv_cache import KVCache
from .rope import short_length
from .step_inputs import StepInputs

NUM_TOKENS = 256  # random tokens of the measured step: enough that some of them make a head's numbers large
HEADROOM = 2.0  # later numbers may be larger than the measured ones by this factor; larger ones are clamped
BLOCK_SIZE = 16


def measured_scales(decoder: Decoder) -> Tensor:
    """Runs a step of random tokens. Returns scales of keys and values, [layers, 2, G] f32 on the decoder's device."""
    config = decoder.spec
    num_tokens = min(NUM_TOKENS, decoder.max_positions)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, decoder.dtype, decoder.device)
    num_short = short_length(config.ropes, decoder.max_positions)
    first = num_short if num_tokens > num_short else 0
    decoder.hidden(_one_prompt(num_tokens, num_blocks, config.vocab_size, decoder.device, first), cache)
    largest = torch.stack([torch.stack(list(_largest(cache, layer))) for layer in config.kv_layers])
    return scales_of(largest)


def scales_of(largest: Tensor) -> Tensor:
    """The least powers of two that leave HEADROOM above `largest`, f32, same shape; 1 where it is 0. Never 0."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = torch.exp2(torch.ceil(torch.log2(largest.double() * HEADROOM / most)))
    return torch.where(largest > 0, scales.clamp(min=torch.finfo(torch.float32).tiny), 1.0).float()


def _largest(cache: KVCache, layer: int) -> Iterator[Tensor]:
    """The largest magnitudes of one layer's keys, then of its values, [G] f32 each."""
    return (numbers.abs().amax((0, 2, 3)).float() for numbers in cache.layer(layer))


def _one_prompt(
    num_tokens: int, num_blocks: int, vocab_size: int, device: torch.device, first_row: int
) -> StepInputs[Tensor]:
    ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens)
    places = torch.arange(num_tokens, device=device)
    return StepInputs(
        input_ids=torch.from_numpy(ids).to(device),
        positions=places + first_row,
        slot_mapping=places,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0),
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        lengths=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        logits_rows=places[:0],
        num_decode=0,
    )
