"""Recurrent layers in plain PyTorch: causal convolution, gated delta rule and Mamba-2, over states by slot.

One token after another in each sequence, all sequences of a step side by side. The order of sums is the same however a
prompt is cut into steps and whatever else is in a step. States are f32, and are changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Where the T new tokens of S sequences lie in a step, and which slot holds each sequence's state.

    Of sequence s, tokens [query_starts[s], query_starts[s + 1]). Made once a step, for all layers.
    """

    slots: Tensor  # [S] i64
    query_starts: Tensor  # [S + 1]
    lengths: Tensor  # [S] tokens, earlier ones included
    is_fixed: bool = False  # sums in one order, however prompts are cut and whatever else is in the step

    @cached_property
    def ordered(self) -> OrderedRows:
        """The same by time. Reads numbers on the host."""
        return OrderedRows.of(self.slots, self.query_starts, self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedRows:
    """The tokens of a step by their place in their sequence.

    `by_time` orders the tokens by their place in their sequence, longest sequence
    first; `actives[t]` sequences have more than t tokens, so the tokens of time t are adjacent there.
    """

    slots: Tensor  # [S] i64, longest sequence first; only those that have tokens
    is_fresh: Tensor  # [S] bool: begins with its first token, so its state is zero whatever the slot holds
    by_time: Tensor  # [T] i64
    actives: list[int]
    order: Tensor  # [S] i64: the sequences of the step, longest first
    sequence_of: Tensor  # [T] i64: which of the step's sequences a token is of
    ends: Tensor  # [S] i64: behind the last token of each of the step's sequences

    @classmethod
    def of(cls, slots: Tensor, query_starts: Tensor, lengths: Tensor) -> OrderedRows:
        """See `SequenceRows`."""
        starts, ends = query_starts[:-1].long(), query_starts[1:].long()
        counts = ends - starts
        if not (has_tokens := counts > 0).all():
            slots, lengths, starts, ends, counts = (x[has_tokens] for x in (slots, lengths, starts, ends, counts))
        order = torch.argsort(counts, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        sequence_of = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        times = torch.arange(len(sequence_of), device=counts.device) - starts[sequence_of]
        by_time = torch.argsort(times * len(counts) + rank[sequence_of])
        is_fresh = lengths.long() == counts
        actives = torch.bincount(times).tolist()
        return cls(slots[order], is_fresh[order], by_time, actives, order, sequence_of, ends)

    def begin(self, states: Tensor) -> Tensor:
        """The states of the sequences, [S, ...], longest first: a copy of those in their slots, or zeros."""
        found = states[self.slots]
        found[self.is_fresh] = 0
        return found


def causal_conv(x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None, step: SequenceRows) -> Tensor:
    """See `RecurrentKernels.causal_conv`."""
    rows = step.ordered
    if (num_tokens := len(rows.sequence_of)) < len(x):
        return _padded(causal_conv(x[:num_tokens], tails, weight, bias, step) if num_tokens else x[:0].float(), x)
    before = tails.shape[1]
    width = before + 1
    places = torch.arange(len(x), device=x.device) + (rows.sequence_of + 1) * before  # each sequence behind its tail
    wide = x.new_empty(len(x) + len(rows.ends) * before, x.shape[1])
    wide[places] = x
    last = (rows.ends + torch.arange(1, len(rows.ends) + 1, device=x.device) * before)[rows.order]
    back = torch.arange(-before, 0, device=x.device)
    counts = torch.bincount(rows.sequence_of, minlength=len(rows.ends))[rows.order]
    wide[(last - counts)[:, None] + back] = rows.begin(tails)
    taps = weight.float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if bias is None else bias.float().expand(x.shape)
    for tap in range(width):
        out = torch.addcmul(out, wide[places - before + tap].float(), taps[:, tap])
    tails[rows.slots] = wide[last[:, None] + back]
    return out


def recur(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, step: SequenceRows
) -> Tensor:
    """See `RecurrentKernels.recur`."""
    rows = step.ordered
    if (num_tokens := len(rows.sequence_of)) < len(v):
        q, k, some, log_decay = (x[:num_tokens] for x in (q, k, v, log_decay))
        beta = None if beta is None else beta[:num_tokens]
        return _padded(recur(states, q, k, some, log_decay, beta, step) if num_tokens else some, v)
    num_tokens, num_heads, value_dim = v.shape
    groups, key_dim = k.shape[1:]
    heads = (groups, num_heads // groups)
    inner = rows.begin(states).view(-1, *heads, key_dim, value_dim)
    order = rows.by_time
    q, k = (one[order].view(num_tokens, groups, 1, key_dim, 1) for one in (q, k))
    v = v[order].view(num_tokens, *heads, 1, value_dim)
    decay = log_decay.exp()[order].view(num_tokens, *heads, 1, 1)
    beta = None if beta is None else beta[order].view(num_tokens, *heads, 1, 1)
    found = v.new_empty(num_tokens, *heads, value_dim)
    begin = 0
    for num_active in rows.actives:
        at = slice(begin, begin + num_active)
        begin += num_active
        state = inner[:num_active].mul_(decay[at])  # [n, G, H / G, K, V]
        update = v[at]
        if beta is not None:
            update = (update - (state * k[at]).sum(-2, keepdim=True)) * beta[at]
        state.addcmul_(k[at], update)
        torch.sum(state * q[at], -2, out=found[at])
    states[rows.slots] = inner.view(-1, num_heads, key_dim, value_dim)
    out = torch.empty_like(found)
    out[order] = found
    return out.view(num_tokens, num_heads, value_dim)


def _padded(found: Tensor, like: Tensor) -> Tensor:
    """`found` [n, ...] with zeros behind it, as many rows as `like` has."""
    return torch.cat((found, found.new_zeros(len(like) - len(found), *like.shape[1:])))


def delta_inputs(
    mixed: Tensor, step: Tensor, rate: Tensor, decay: Tensor, step_bias: Tensor, groups: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `RecurrentKernels.delta_inputs`."""
    mixed, step, rate = F.silu(mixed), step.float(), rate.float()
    keys = groups * key_dim
    q, k, v = mixed.split_with_sizes((keys, keys, mixed.shape[1] - 2 * keys), -1)
    q, k = (unit(one.reshape(len(one), groups, key_dim)) for one in (q, k))
    v = v.reshape(len(v), len(decay), -1)
    return q * key_dim**-0.5, k, v, decay * F.softplus(step + step_bias), torch.sigmoid(rate)


def mamba_inputs(
    mixed: Tensor,
    step: Tensor,
    decay: Tensor,
    step_bias: Tensor,
    step_limit: tuple[float, float],
    groups: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `RecurrentKernels.mamba_inputs`."""
    mixed, keys = F.silu(mixed), groups * key_dim
    x, k, q = mixed.split_with_sizes((mixed.shape[1] - 2 * keys, keys, keys), -1)
    q, k = (one.reshape(len(one), groups, key_dim) for one in (q, k))
    x = x.reshape(len(x), len(decay), -1)
    size = F.softplus(step.float() + step_bias).clamp(*step_limit)
    return q, k, x, x * size[..., None], decay * size


def unit(x: Tensor) -> Tensor:
    """Each row of x [..., D] f32 divided by its length, as the delta rule takes queries and keys."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
    """See `RecurrentKernels.gated_norm`."""
    dtype, gate = gate.dtype, gate.reshape(x.shape)
    opened = F.silu(gate.float())
    normed = F.rms_norm(x * opened if is_gated_first else x, x.shape[-1:], None, eps)
    normed = normed * weight.float().view(-1, x.shape[-1])
    return (normed if is_gated_first else normed * opened).reshape(len(x), -1).to(dtype)
