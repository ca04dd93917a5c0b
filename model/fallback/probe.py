"""Compares a model on the paged cache with the same model under transformers' own attention, before it serves.

A fixed prompt runs whole by transformers, and by the decoder in chunks and single tokens beside a neighbour. Windows
and chunks of attention are made small meanwhile, so that a short prompt is longer than both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from ...kernels.kernel_set import KernelSet
from ..decoder.kv_cache import KVCache
from ..decoder.step_inputs import StepInputs
from .attention_interface import IMPLEMENTATION
from .errors import UnservableError
from .paged_layers import paged_layers
from .row_check import check_rows
from .transformers_decoder import TransformersDecoder, TransformersModel

CHUNK, NUM_SINGLE = 24, 4  # tokens of a chunk of the prompt; single tokens behind the chunks
NUM_TOKENS = 4 * CHUNK + NUM_SINGLE
NUM_OTHERS = 5  # tokens of the neighbour's prompt, which then gets one a step
BLOCK_SIZE = 16
SMALL = {"sliding_window": 20, "attention_chunk_size": 28}  # sizes while the probe runs, by key of the configuration
NUM_TRIES = 2  # prompts: where two experts score the same, rounding sends a token to either
TOLERANCE = 1e-3  # of a row in float32, relative to its largest logit
HALF_TOLERANCE = 0.06  # of the median row in half precision


def probe(loaded: TransformersModel, kernels: KernelSet, max_model_len: int) -> None:
    """Raises UnservableError for a model whose tokens would not be those of transformers."""
    num_tokens = min(NUM_TOKENS, max_model_len)
    tokens = _plain_tokens(loaded)
    check_rows(loaded, _prompt(loaded, tokens, 0), max_model_len)
    problem: str | None = None
    with _small_reaches(loaded):
        layers = paged_layers(loaded.calls, loaded.model.config)
        decoder = TransformersDecoder(loaded, kernels, max_model_len, layers=layers)
        for number in range(NUM_TRIES):
            prompt, other = (_prompt(loaded, tokens, seed)[:num_tokens] for seed in (2 * number, 2 * number + 1))
            problem = _difference(decoder, prompt, other)
            if problem is None:
                return
    raise UnservableError(str(problem))


def _difference(decoder: TransformersDecoder, prompt: Tensor, other: Tensor) -> str | None:
    """In what the decoder differs from transformers for this prompt [P], beside another; None if in nothing."""
    whole = _whole(decoder.loaded, prompt)
    parts, starts = _in_parts(decoder, prompt, other)
    if not bool(parts.isfinite().all()):
        return "the probe's logits are not finite"
    errors = ((parts - whole).abs().amax(-1) / whole.abs().amax(-1).clamp_min(1e-30)).cpu()
    is_exact = decoder.dtype == torch.float32
    most = TOLERANCE if is_exact else HALF_TOLERANCE
    for rows, where in ((errors, ""), (errors[starts], " in the first tokens of its parts")):
        error = float(rows.max() if is_exact else rows.median())
        if error > most:
            what = "a prompt computed in parts differs from the same prompt computed whole"
            return f"{what}{where}, by {error:.2g} of the largest logit (at most {most:g} is rounding)"
    return None


@torch.inference_mode()
def _whole(loaded: TransformersModel, prompt: Tensor) -> Tensor:
    """The logits [P, V] of a whole prompt by transformers' own plain attention, f32."""
    positions = torch.arange(len(prompt), device=loaded.device)
    loaded.model.set_attn_implementation("eager")
    try:
        return loaded.body.logits_of_step(prompt, positions, positions).float()
    finally:
        loaded.model.set_attn_implementation(IMPLEMENTATION)


def _in_parts(decoder: TransformersDecoder, prompt: Tensor, other: Tensor) -> tuple[Tensor, list[int]]:
    """The logits [P, V] of a prompt that runs in parts beside another, f32; and the first row of each part."""
    num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(2 * num_blocks).astype(np.int32).reshape(2, num_blocks)
    cache = KVCache(decoder.spec, 2 * num_blocks, BLOCK_SIZE, decoder.dtype, decoder.device, decoder.kernels)
    sequences = [_ProbeSequence(other, tables[1]), _ProbeSequence(prompt, tables[0])]
    sizes = [CHUNK] * ((len(prompt) - 1) // CHUNK)
    sizes += [1] * (len(prompt) - sum(sizes))
    found, starts = [], []
    for number, size in enumerate(sizes):
        starts.append(sequences[1].num_done)
        inputs = _inputs(sequences, (1 if number else min(NUM_OTHERS, len(other)), size), decoder.device)
        found.append(decoder.forward(inputs, cache).float())
    hidden = decoder.hidden(inputs, cache)  # the last step once more, in two calls: it writes the same keys and values
    found[-1] = decoder.logits(hidden.index_select(0, inputs.logits_rows)).float()
    return torch.cat(found), starts


@dataclass(slots=True)
class _ProbeSequence:
    tokens: Tensor  # [P] i64
    table: NDArray[np.int32]  # its blocks
    num_done: int = 0


def _inputs(sequences: Sequence[_ProbeSequence], counts: Sequence[int], device: torch.device) -> StepInputs[Tensor]:
    """The step in which each sequence has its next `counts` tokens, with logits of the last sequence."""
    tokens, positions, slots = [], [], []
    for sequence, count in zip(sequences, counts, strict=True):
        rows = np.arange(sequence.num_done, sequence.num_done + count) % len(sequence.tokens)
        sequence.num_done += count
        tokens.append(sequence.tokens[torch.from_numpy(rows).to(device)])
        positions.append(rows)
        slots.append(sequence.table[rows // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + rows % BLOCK_SIZE)
    starts = np.concatenate([[0], np.cumsum(counts)])
    lengths = np.array([sequence.num_done for sequence in sequences], np.int32)

    def on_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        input_ids=torch.cat(tokens),
        positions=on_device(np.concatenate(positions)),
        slot_mapping=on_device(np.concatenate(slots)),
        block_tables=on_device(np.stack([sequence.table for sequence in sequences])),
        query_starts=on_device(starts.astype(np.int32)),
        lengths=on_device(lengths),
        logits_rows=on_device(np.arange(starts[-2], starts[-1])),
        num_decode=sum(count == 1 for count in counts),
    )


def _plain_tokens(loaded: TransformersModel) -> NDArray[np.int64]:
    """The ids of tokens that have no meaning of their own, as that of an image has."""
    special: set[int] = set()
    waiting = [loaded.model.config.to_dict()]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif str(key).endswith(("token_id", "token_index")):
                special.update(each for each in (value if isinstance(value, list) else [value]) if type(each) is int)
    # Not the last quarter: tables besides the embedding may have fewer rows.
    ids = [token for token in range(-(-loaded.spec.vocab_size * 3 // 4)) if token not in special]
    return np.array(ids or [0], np.int64)


def _prompt(loaded: TransformersModel, tokens: NDArray[np.int64], seed: int) -> Tensor:
    """Random tokens, [NUM_TOKENS] i64."""
    return torch.from_numpy(np.random.default_rng(seed).choice(tokens, NUM_TOKENS)).to(loaded.device)


@contextmanager
def _small_reaches(loaded: TransformersModel) -> Iterator[None]:
    """Within this context windows and chunks are small, in every configuration and module that has them."""
    model = loaded.model
    holders: dict[int, object] = {id(model.config): model.config}
    text = model.config.get_text_config(decoder=True)
    holders[id(text)] = text
    for module in model.modules():
        holders[id(module)] = module
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            holders[id(config)] = config
    before = [
        (holder, key, value)
        for holder in holders.values()
        for key, size in SMALL.items()
        if type(value := getattr(holder, key, None)) is int and value > size
    ]
    try:
        for holder, key, _ in before:
            setattr(holder, key, SMALL[key])
        yield
    finally:
        for holder, key, value in before:
            setattr(holder, key, value)
