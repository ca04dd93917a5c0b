"""Attention over contexts in two parts: what some rows have in common, and what each has for itself.

A softmax over both parts is the two results weighted by their sums of exponentials, so the common part is read once, by
the queries of all those rows as one tall matrix. For a CPU.

T query rows, H query heads, G key/value heads, R = H / G, D head size, L tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SDPA that returns the log-sum-exp as well: not part of torch's interface, but what it calls on a CPU.
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def can_see_parts(device: torch.device) -> bool:
    """Whether attention tells its log-sum-exp there."""
    return device.type == "cpu" and _FLASH is not None


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [C, G, R, D] over keys and values [C, G, L, D], as q, and the log-sum-exp of its scores,
    [C, G, R] f32. `mask` as for SDPA."""
    assert _FLASH is not None
    seen, logs = _FLASH(q, keys, values, attn_mask=mask, scale=scale)
    return seen, logs


def see_as_well(
    out: Tensor, logs: Tensor, q: Tensor, rows: Tensor | None, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """`out` with what `rows` see of a part that they have in common added to what they saw of their own.

    out     [T, H, D]     what each row saw; may be written to: go on with what is returned
    logs    [T, H] f32    log-sum-exp of the scores of that
    q       [T, H, D]     as out
    rows    [C] i64       None = all, in order
    keys, values  [1, G, L, D]  the common part, all of it seen by each of the rows
    """
    num_groups, head_dim = keys.shape[1], keys.shape[3]
    queries = rows_of(q, rows)
    tall = queries.view(len(queries), num_groups, -1, head_dim).transpose(0, 1).flatten(1, 2)  # [G, C * R, D]
    seen, log = attend(tall.unsqueeze(0), keys, values, None, scale)
    seen = seen.reshape(num_groups, len(queries), -1, head_dim).transpose(0, 1).reshape(queries.shape)  # [C, H, D]
    log = log.reshape(num_groups, len(queries), -1).transpose(0, 1).reshape(queries.shape[:2])  # [C, H]
    weight = torch.sigmoid(log - rows_of(logs, rows)).to(q.dtype).unsqueeze(-1)  # of the common part
    both = rows_of(out, rows).lerp(seen, weight)
    return both if rows is None else out.index_copy_(0, rows, both)


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows [C] of x; None = all of it."""
    return x if rows is None else x.index_select(0, rows)
