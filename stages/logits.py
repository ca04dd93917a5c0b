"""The mathematics of choosing tokens: plain functions of logits and numbers, with no state.

What happens to a row depends on nothing but that row: sums run over one row in one order, however many rows there are
and whatever they ask for. So a sequence gets the same tokens alone and in a batch, as long as its logits are the same.

N rows, V tokens in the vocabulary. Rows of V numbers are torch tensors, on any device; everything small is numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .messages import TopLogprobs

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

BLOCK = 128  # tokens; small enough to look at twice, large enough that torch reduces whole vectors
LOWEST = float(np.finfo(np.float32).min)  # below every number that is a candidate; a masked token is -inf
NUM_LIKELY = 256  # blocks, or a quarter of them; the guess for top_p is the least of so many largest maxima
WHOLE_SIZE = 2**20  # entries that are sorted at a time where rows are sorted whole; 40 MB
SLACK = 1e-3  # subtracted from a bound that only saves work, so that rounding never takes a token away


# -- randomness


def uniform(seeds: NDArray[np.uint64], positions: Longs) -> Doubles:
    """One number in [0, 1) for each (seed, absolute position of the token to be chosen), and a function of both only.

    SplitMix64: its stream for the mixed seed, at index `position`. 53 random bits.
    """
    state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# -- edits, in place, of single entries of float32 logits [N, V]. `rows` and `ids` broadcast; ids may repeat in a row


def penalise_repetition(logits: Tensor, rows: Tensor, ids: Tensor, penalty: Tensor) -> None:
    """Divides positive logits by `penalty` and multiplies others, once for each distinct id. All [n, W] or [n, 1]."""
    seen = logits[rows, ids]
    logits[rows, ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def penalise_frequency(logits: Tensor, rows: Tensor, ids: Tensor, penalty: Tensor) -> None:
    """Takes `penalty` off each id as often as it is listed. `penalty` [n, W]: 0 where the listing is padding."""
    logits.index_put_((rows.expand_as(ids), ids), -penalty, accumulate=True)


def penalise_presence(logits: Tensor, rows: Tensor, ids: Tensor, penalty: Tensor) -> None:
    """Takes `penalty` off, once for each distinct id. All [n, W] or [n, 1]."""
    logits[rows, ids] = logits[rows, ids] - penalty


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Adds `bias[i]` to token `ids[i]` of row `rows[i]`. All [n]."""
    logits.index_put_((rows, ids), bias, accumulate=True)


def forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Token `ids[i]` of row `rows[i]` cannot be chosen. Both [n]."""
    logits[rows, ids] = -torch.inf


def allow_only(logits: Tensor, rows: Tensor, is_forbidden: Tensor) -> None:
    """In each of `rows` [n], in rising order, the tokens of `is_forbidden` [n, V] cannot be chosen."""
    if len(rows) == len(logits):
        logits.masked_fill_(is_forbidden, -torch.inf)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf))


# -- rows in blocks


class Blocks:
    """Rows of V numbers as blocks of 128, the last one shorter.

    Reducing blocks reads a row once at memory speed; what is then looked at closely is a few blocks. On a CPU the index
    of a maximum found in this way takes 0.4 ns an entry, `torch.argmax` 6.
    """

    def __init__(self, x: Tensor) -> None:
        num_whole = x.shape[1] // BLOCK
        self._head = x[:, : num_whole * BLOCK].view(len(x), num_whole, BLOCK)
        self._tail = x[:, num_whole * BLOCK :]

    def maxima(self) -> Floats:
        """The largest number of each block, [N, ceil(V / 128)]. NaN where a block holds one."""
        return _to_numpy(self._reduced(lambda x, keepdim: x.amax(-1, keepdim=keepdim)).float())

    def sums(self) -> Doubles:
        """The sum of each block, [N, ceil(V / 128)]; each sum is of one block in one order."""
        sums: Doubles = _to_numpy(self._reduced(lambda x, keepdim: x.sum(-1, keepdim=keepdim))).astype(np.float64)
        return sums

    def _reduced(self, reduce: Callable[[Tensor, bool], Tensor]) -> Tensor:
        if not self._tail.shape[1]:
            return reduce(self._head, False)
        tail = reduce(self._tail, True)
        return torch.cat([reduce(self._head, False), tail], dim=1) if self._head.shape[1] else tail

    def take(self, rows: Longs, blocks: Longs) -> Floats:
        """Block `blocks[i]` of row `rows[i]`, [n, 128]; -inf past the end of the vocabulary."""
        is_whole = blocks < self._head.shape[1]
        if is_whole.all():
            if self._head.device.type == "cpu":
                return np.asarray(self._head.float())[rows, blocks]  # half the time of torch's indexing
            return _to_numpy(self._head[_like(self._head, rows), _like(self._head, blocks)].float())
        found = np.full((len(rows), BLOCK), -np.inf, np.float32)
        found[is_whole] = self.take(rows[is_whole], blocks[is_whole])
        tail = self._tail[_like(self._tail, rows[~is_whole])]
        found[~is_whole, : tail.shape[1]] = _to_numpy(tail.float())
        return found

    def argmax(self, maxima: Floats, rows: Longs) -> Longs:
        """The likeliest token of each of `rows`, the lowest id among equals. `maxima` are those of this object."""
        blocks = maxima[rows].argmax(1)
        token_ids: Longs = blocks * BLOCK + self.take(rows, blocks).argmax(1)
        return token_ids


# -- drawing


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the tokens of n rows are drawn. Each array is [n]."""

    temperature: Doubles  # above 0
    top_k: Longs  # 0 is off
    top_p: Doubles  # 1 is off
    min_p: Doubles  # 0 is off
    u: Doubles  # the randomness, in [0, 1)

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> Drawing:
        return Drawing(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.u[rows])


def draw(logits: Tensor, best: Doubles, drawing: Drawing) -> Longs:
    """Tokens by inverse CDF in the order of the vocabulary: the first whose cumulative probability is above `u`.

    logits [n, V] with finite maxima `best` [n]. Truncation is not looked at.
    """
    blocks = Blocks(_weights(logits, best, drawing.temperature))
    rows = np.arange(len(best))
    sums = blocks.sums().cumsum(1)
    target = drawing.u * sums[:, -1]
    block = _first_above(sums, target)
    before = np.where(block > 0, sums[rows, block - 1], 0.0)
    inside = np.maximum(blocks.take(rows, block), 0.0).cumsum(1, dtype=np.float64)  # nothing past the end
    return block * BLOCK + _first_above(inside, target - before)


def draw_truncated(logits: Tensor, maxima: Floats, drawing: Drawing) -> Longs:
    """As `draw`, from what top_k, top_p and min_p leave, in that order. `maxima` [n, B] are those of `Blocks(logits)`.

    Each of the three keeps every token that is at least as likely as some threshold, so tokens that tie with the last
    one kept are kept too. Exact at a fraction of a sort's cost: block maxima give a bound, and only tokens above it,
    the candidates, are looked at. For top_p alone that is a guess, which holds if the candidates have the share of the
    probability that is asked for. Rows where it does not, or with most blocks above the bound, are sorted whole.
    """
    best = maxima.max(1).astype(np.float64)
    mass = np.ones(len(best))  # of the whole row; the likeliest token has 1
    is_guess = (drawing.top_p < 1) & (drawing.top_k == 0)
    rows = np.flatnonzero(is_guess)
    if len(rows):
        weights = _weights(rows_of(logits, rows), best[rows], drawing.temperature[rows])
        mass[rows] = Blocks(weights).sums().cumsum(1)[:, -1]
    bound = _bound(maxima, best, drawing)
    is_near = maxima >= bound[:, None]
    is_whole = is_near.sum(1) * 2 > maxima.shape[1]
    chosen = np.zeros(len(best), np.int64)
    few = np.flatnonzero(~is_whole)
    if len(few):
        found = _candidates(Blocks(logits), is_near & ~is_whole[:, None], bound, best, drawing.temperature)
        chosen[few] = _draw_candidates(found, few, drawing, mass)
        covered = np.bincount(found.row, weights=np.exp(found.value), minlength=len(best))
        is_short = covered < drawing.top_p * mass * (1 + SLACK)
        is_whole |= is_guess & is_short & (bound > best + drawing.temperature * _log(drawing.min_p))
    whole = np.flatnonzero(is_whole)
    if len(whole):
        chosen[whole] = _draw_whole(rows_of(logits, whole), best[whole], drawing[whole], mass[whole])
    return chosen


def _bound(maxima: Floats, best: Doubles, drawing: Drawing) -> Doubles:
    """[n], for each row a logit that no token to keep is below; for top_p alone most likely so.

    top_k: k blocks have a maximum at or above the k-th largest maximum, so k tokens are. min_p is itself a threshold;
    but where top_p takes its share of what top_k kept, all of that is needed and top_k's bound stands alone.
    """
    num_blocks = maxima.shape[1]
    likely = max(num_blocks // 4, 1)
    num_wanted = np.where(drawing.top_k > 0, drawing.top_k, np.where(drawing.top_p < 1, min(NUM_LIKELY, likely), 0))
    bound = np.full(len(best), LOWEST)
    for k in np.unique(num_wanted).tolist():
        if 0 < k <= num_blocks:
            rows = np.flatnonzero(num_wanted == k)
            bound[rows] = np.partition(maxima[rows], num_blocks - k, axis=1)[:, num_blocks - k]
    by_min_p = best + drawing.temperature * (_log(drawing.min_p) - SLACK)
    by_min_p[(drawing.top_k > 0) & (drawing.top_p < 1)] = LOWEST
    highest: Doubles = np.maximum(np.maximum(bound, by_min_p), LOWEST)
    return highest


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens of several rows in a line, sorted by (row, id)."""

    row: Longs
    token_id: Longs
    value: Doubles  # log-weight, 0 for the likeliest of the row


def _candidates(blocks: Blocks, is_near: Bools, bound: Doubles, best: Doubles, temperature: Doubles) -> _Candidates:
    """The tokens at or above `bound` in the blocks that are near."""
    rows, near = np.nonzero(is_near)
    found = blocks.take(rows, near)
    at_block, at = np.nonzero(found >= bound[rows][:, None])
    row = rows[at_block]
    return _Candidates(row, near[at_block] * BLOCK + at, (found[at_block, at] - best[row]) / temperature[row])


def _draw_candidates(found: _Candidates, rows: Longs, drawing: Drawing, mass: Doubles) -> Longs:
    """One token for each of `rows`. Rows of about the same number of candidates are drawn from together, side by side:
    so padding costs at most 8 times what is there."""
    counts = np.bincount(found.row, minlength=len(mass))
    column = np.arange(len(found.row)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.ceil(np.log2(np.maximum(counts, 8)) / 3)
    chosen = np.zeros(len(mass), np.int64)
    for each in np.unique(size[rows]):
        some = rows[size[rows] == each]
        mine = np.flatnonzero(size[found.row] == each)
        place = np.repeat(np.arange(len(some)), counts[some]), column[mine]
        values = np.full((len(some), int(counts[some].max())), -np.inf)
        values[place] = found.value[mine]
        ids = np.zeros(values.shape, np.int64)
        ids[place] = found.token_id[mine]
        chosen[some] = ids[np.arange(len(some)), _draw_from(values, drawing[some], mass[some])]
    return chosen[rows]


def _draw_whole(logits: Tensor, best: Doubles, drawing: Drawing, mass: Doubles) -> Longs:
    """One token for each row, some rows at a time: an entry takes about 40 bytes here."""
    parts, num_rows = [], max(WHOLE_SIZE // logits.shape[1], 1)
    for start in range(0, len(best), num_rows):
        some = slice(start, start + num_rows)
        values = _to_numpy(logits[some].float()).astype(np.float64)
        values -= best[some, None]
        values /= drawing.temperature[some, None]
        parts.append(_draw_from(values, drawing[some], mass[some]))
    return np.concatenate(parts)


def _draw_from(values: Doubles, drawing: Drawing, mass: Doubles) -> Longs:
    """[n] places in log-weights [n, W], which are in the order of the vocabulary; -inf is padding."""
    is_kept = values >= thresholds(values, drawing, mass)[:, None]
    sums = np.where(is_kept, np.exp(values), 0.0).cumsum(1)
    return _first_above(sums, drawing.u * sums[:, -1])


def thresholds(values: Doubles, drawing: Drawing, mass: Doubles) -> Doubles:
    """[n], the least log-weight that top_k, then top_p, then min_p keep. The likeliest token is always kept.

    values [n, W] log-weights relative to the row's largest, which is 0; -inf is padding. mass [n] the sum of all
    weights of the row, candidates or not; not read where top_k is on.
    """
    width = values.shape[1]
    rows = np.arange(len(values))
    falling = -np.sort(-values, axis=1)
    has_top_k = drawing.top_k > 0
    least = np.where(has_top_k, falling[rows, np.clip(drawing.top_k, 1, width) - 1], -np.inf)
    weights = np.where(falling >= least[:, None], np.exp(falling), 0.0)
    sums = weights.cumsum(1)
    mass = np.where(has_top_k, sums[:, -1], mass)
    num_kept = ((sums - weights) < (drawing.top_p * mass)[:, None]).sum(1)
    by_top_p = np.where(drawing.top_p < 1, falling[rows, num_kept - 1], -np.inf)
    highest: Doubles = np.maximum(np.maximum(least, by_top_p), _log(drawing.min_p))
    return highest


def truncated(logits: Tensor, drawing: Drawing) -> Tensor:
    """Logits [n, V] that are over their temperature already, -inf where top_k, top_p and min_p leave nothing."""
    values = _to_numpy(logits).astype(np.float64)
    values -= values.max(1, keepdims=True)
    least = thresholds(values, drawing, np.exp(values).sum(1))
    return logits.masked_fill(torch.from_numpy(values < least[:, None]).to(logits.device), -torch.inf)


def _weights(logits: Tensor, best: Doubles, temperature: Doubles) -> Tensor:
    """exp((logits - best) / temperature), [n, V] f32, a new tensor: probabilities up to a factor; the largest is 1."""
    scaled = logits.float() - _column(logits, best)
    if (temperature != 1).any():
        scaled.div_(_column(logits, temperature))
    return scaled.exp_()


def _log(x: Doubles) -> Doubles:
    with np.errstate(divide="ignore"):
        logarithms: Doubles = np.log(x)
    return logarithms


def _first_above(sums: Doubles, target: Doubles) -> Longs:
    """[n], in each row the first place at which the running sum is above `target`. It is a place where the sum grows,
    also when rounding has brought `target` up to the whole sum."""
    target = np.minimum(target, np.nextafter(sums[:, -1], 0.0))
    places: Longs = (sums <= target[:, None]).sum(1)
    return places


# -- log-probabilities


def top_logprobs(logits: Tensor, token_ids: Longs, num_top: Longs) -> list[TopLogprobs]:
    """Natural logarithms of the probabilities that `logits` [n, V] give, in float32: the chosen `token_ids` [n], its
    rank, and the `num_top` [n] likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, _like(logits, token_ids[:, None]))
    ranks = _to_numpy((logprobs > chosen).sum(1) + 1).tolist()
    top = logprobs.topk(min(int(num_top.max()), logits.shape[1]), dim=1)
    ids, values = _to_numpy(top.indices).tolist(), _to_numpy(top.values).tolist()
    return [
        TopLogprobs(lp, rank, tuple(ids[i][:k]), tuple(values[i][:k]))
        for i, (lp, rank, k) in enumerate(zip(_to_numpy(chosen[:, 0]).tolist(), ranks, num_top.tolist(), strict=True))
    ]


# -- between numpy and torch


def rows_of(x: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """These rows of `x`, in rising order; `x` itself when that is all of them."""
    return x if len(rows) == len(x) else x.index_select(0, _like(x, rows))


def _column(x: Tensor, values: Doubles) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(x.device)[:, None]


def _like(x: Tensor, indices: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(indices).to(x.device)


def _to_numpy(x: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.cpu().numpy()
    return array
