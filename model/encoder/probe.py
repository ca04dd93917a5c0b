"""A test of a loaded encoder on a few tokens: what a config.json says is not always what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError, shown

Run = Callable[[Tensor, Tensor], Tensor]
SHORT, LONG = 7, 12  # tokens of the two texts
# Of a text's largest number: how far its numbers may differ with padding behind it, as sums have another order.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class Probed:
    """What a test of an encoder found."""

    width: int  # numbers of a hidden state; of a cross-encoder, a score
    allows_padding: bool  # False: padding changes a text's numbers, so texts in a batch must be of one length


def probe(run: Run, source: str, vocab_size: int, pad_token_id: int, max_tokens: int, dtype: torch.dtype) -> Probed:
    """Runs an encoder on two short texts, alone and together.

    `run` takes token ids and mask, [N, P] i64 each, and returns hidden states [N, P, width] or logits [N, width] in
    f32. Raises CheckpointError for a model that fails, that draws at random, or whose tokens do not attend to later
    ones. `source` names the model in messages.
    """
    ids = torch.tensor([(1 + place * 7919) % vocab_size for place in range(SHORT + LONG)])
    text, other = ids[: min(SHORT, max_tokens)], ids[SHORT : SHORT + min(LONG, max_tokens)]
    pair = torch.stack([text, torch.cat([text[:1], other[: len(text) - 1]])])  # equal in the first token only
    try:
        right, changed = run(pair, torch.ones_like(pair))
    except Exception as error:  # of any type: it comes out of another project's model
        hint = "" if dtype == torch.float32 else "; try dtype = float32"
        raise CheckpointError(f"{source} fails on texts of {len(text)} tokens: {first_line(error)}{hint}") from None
    is_hidden = right.ndim == 2 and len(right) == len(text)
    if right.ndim != 1 and not is_hidden:
        raise CheckpointError(f"{source} gives {list(right.shape)} for {len(text)} tokens: must be a vector a token")
    if not bool(right.isfinite().all()):
        raise CheckpointError(f"{source} gives numbers that are not finite in {dtype}; try dtype = float32")
    rounding = float(right.abs().max()) * ROUNDING[dtype]
    if is_hidden and len(text) > 1 and _difference(right[0], changed[0]) < rounding / 100:
        raise CheckpointError(
            f"{source}: its tokens do not attend to later ones, as those of an encoder do and config.json says; "
            "embeddings would be wrong"
        )
    allows_padding = _allows_padding(run, text, other, pad_token_id, right, rounding)
    if not allows_padding and _difference(run(pair, torch.ones_like(pair))[0], right) > rounding:
        raise CheckpointError(f"{source} draws at random: it gives other numbers each time for the same text")
    return Probed(right.shape[-1], allows_padding)


def _allows_padding(run: Run, text: Tensor, other: Tensor, pad_token_id: int, right: Tensor, rounding: float) -> bool:
    """Whether `text` keeps its numbers `right` with padding behind it, beside a longer text.

    The padding's own tokens must not matter at all: that shows a small influence, which rounding would hide.
    """
    padding = torch.full_like(other, pad_token_id)
    ids = torch.stack([torch.cat([text, behind[len(text) :]]) for behind in (padding, other)] + [other])
    mask = torch.ones_like(ids)
    mask[:2, len(text) :] = 0
    try:
        first, second, _ = run(ids, mask)
    except Exception:  # of any type, as above; then it runs without padding
        return False
    if right.ndim == 2:
        first, second = first[: len(text)], second[: len(text)]
    return _difference(first, right) <= rounding and _difference(first, second) <= rounding / 100


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def first_line(error: Exception) -> str:
    """The first line of an error of another project's code, for an error text."""
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])
