"""Attention over contexts in two parts: a prefix that rows share, and the rest of each row. For a CPU.

The softmax over both parts is the two results weighted by their sums of exponentials. So the prefix is read once, by
the queries of all its rows as one tall matrix.

T query rows, H query heads, G key/value heads, R = H / G, D head size, L tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# NOTE: private to torch: what SDPA calls on a CPU. It returns the log-sum-exp as well.
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def can_see_parts(device: torch.device) -> bool:
    """Whether attention on that device can return its log-sum-exp, which `see_as_well` needs."""
    return device.type == "cpu" and _FLASH is not None


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [C, G, R, D] over keys and values [C, G, L, D]; `mask` as for SDPA.

    Each of `sinks` [G, R] f32 is one more score of its rows, without a value. A context in parts has them in one part
    only.

    Returns the result, as q, and the log-sum-exp of the scores, [C, G, R] f32.
    """
    assert _FLASH is not None
    seen, logs = _FLASH(q, keys, values, attn_mask=mask, scale=scale)
    if sinks is not None:
        share = torch.sigmoid(logs - sinks).unsqueeze(-1)  # of the keys in the sum of weights
        seen, logs = (seen * share).to(seen.dtype), torch.logaddexp(logs, sinks)
    return seen, logs


def see_as_well(
    out: Tensor, logs: Tensor, q: Tensor, rows: Tensor | None, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Merges the attention of `rows` over a shared prefix into `out`, their attention over the rest.

    out     [T, H, D]     attention over each row's own part; may be overwritten, so use the result instead
    logs    [T, H] f32    log-sum-exp of the scores of `out`
    q       [T, H, D]     as out
    rows    [C] i64       None = all, in order
    keys, values  [1, G, L, D]  the prefix; each row sees all of it

    Returns [T, H, D] as out.
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
