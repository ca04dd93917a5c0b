"""Edits of single entries of float32 logits [N, V], in place: penalties, bias, masks.

`rows` and `ids` broadcast; ids may repeat in a row. The logits are numpy's or torch's, as in `sampling_math.py`.
"""

from __future__ import annotations

import numpy as np

from ..device.arrays import Array, arrays_of
from ..messages import Ints
from .logit_tiles import LogitTiles, Longs, rows_of


def penalise_repetition(logits: Array, rows: Array, ids: Array, penalty: Array) -> None:
    """Divides positive logits by `penalty` and multiplies others, once for each distinct id.

    All [n, W] or [n, 1].
    """
    seen = logits[rows, ids]
    logits[rows, ids] = arrays_of(logits).where(seen < 0, seen * penalty, seen / penalty)


def penalise_frequency(logits: Array, rows: Array, ids: Array, penalty: Array) -> None:
    """Subtracts `penalty` from each id as often as it is listed.

    `penalty` [n, W]: 0 where the listing is padding.
    """
    arrays_of(logits).add(logits, (rows, ids), -penalty)


def penalise_presence(logits: Array, rows: Array, ids: Array, penalty: Array) -> None:
    """Subtracts `penalty` once for each distinct id. All [n, W] or [n, 1]."""
    logits[rows, ids] = logits[rows, ids] - penalty


def add_bias(logits: Array, rows: Array, ids: Array, bias: Array) -> None:
    """Adds `bias[i]` to token `ids[i]` of row `rows[i]`. All [n]."""
    arrays_of(logits).add(logits, (rows, ids), bias)


def forbid(logits: Array, rows: Array, ids: Array) -> None:
    """Sets token `ids[i]` of row `rows[i]` to -inf. Both [n]."""
    logits[rows, ids] = -np.inf


def allow_only(logits: Array, rows: Longs, masks: Ints) -> None:
    """Sets to -inf, in each of `rows` [n], the tokens whose bits are 0 in `masks` [n, W].

    `rows` ascend. The masks are on the host, the lowest bit of each word first.
    """
    from ...model.text.grammar import unpack  # loaded already, if there are masks

    arrays = arrays_of(logits)
    is_forbidden = arrays.beside(logits, ~unpack(masks, logits.shape[1]))
    if len(rows) == len(logits):
        arrays.hide(logits, is_forbidden)
    else:
        arrays.put(logits, rows, arrays.hide(arrays.take(logits, rows), is_forbidden))


def allow_end(logits: Array, rows: Longs, end_id: int) -> None:
    """Makes the token `end_id` certain in those of `rows` [n] that allow no token at all."""
    none = rows[LogitTiles(rows_of(logits, rows)).likeliest()[1] == -np.inf]
    if len(none):
        logits[arrays_of(logits).beside(logits, none), end_id] = 0.0
