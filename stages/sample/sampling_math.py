"""The mathematics of sampling: stateless functions of logits and numbers.

The result of a row depends on that row alone: a sum runs over one row in a fixed order, whatever the batch holds.
So a sequence with the same logits gets the same tokens alone and in a batch.

N rows, V tokens in the vocabulary. Rows of V numbers are numpy arrays or torch tensors on any device, as the model
returns them (`stages/device/arrays.py`); everything small is numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.sampling_fields import NO_CUTS, PLACE
from ..device.arrays import Array, HostArray, arrays_of
from ..messages import TopLogprobs
from .logit_tiles import BLOCK, LogitTiles, rows_of

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

LOWEST = float(np.finfo(np.float32).min)  # below every candidate; a masked token is -inf
NUM_LIKELY = 256  # block maxima, or a quarter of all; the bound guessed for top_p is the least of these largest ones
WHOLE_SIZE = 2**20  # entries sorted at a time where rows are sorted whole; 40 MB
_NO_CUTS = np.array(NO_CUTS, np.float64)
SLACK = 1e-3  # subtracted from a bound that only saves work, so that rounding never removes a token


# -- randomness


def uniform(seeds: NDArray[np.uint64], positions: Longs) -> Doubles:
    """A random number in [0, 1) for each (seed, absolute position of the token to choose).

    It depends on nothing else. SplitMix64: its stream for the mixed seed, at index `position`. 53 random bits.
    """
    state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# -- choosing


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The sampling parameters of n rows."""

    values: Doubles  # [n, D] the numbers of `DRAWS`; temperatures are above 0
    u: Doubles  # [n] random numbers in [0, 1)

    def of(self, name: str) -> Doubles:
        """[n] one of the numbers; a cut that is off has its default."""
        column: Doubles = self.values[:, PLACE[name]]
        return column

    @property
    def temperature(self) -> Doubles:
        return self.of("temperature")

    @property
    def top_k(self) -> Longs:
        return self.of("top_k").astype(np.int64)

    @property
    def is_truncated(self) -> Bools:
        is_cut: Bools = (self.values[:, 1:] != _NO_CUTS).any(1)
        return is_cut

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> DrawParams:
        return DrawParams(self.values[rows], self.u[rows])


def choose(logits: Array, is_random: Bools, drawing: DrawParams | None) -> tuple[Longs, Bools]:
    """Chooses one token for each row of `logits` [n, V]: (token ids [n], is_broken [n]).

    Draws where `is_random`, and elsewhere takes the likeliest token, the lowest id among equals. Without a `drawing`
    no row is random. A row is broken if it has no finite maximum; its token is 0 and its logits are modified.
    """
    blocks = LogitTiles(logits)
    token_ids, best = blocks.likeliest()
    is_broken = ~np.isfinite(best)
    has_broken = np.count_nonzero(is_broken) > 0
    if has_broken:
        blocks.clear(is_broken)  # finite numbers for the code below; the choice is not used
        best[is_broken] = 0.0
    if drawing is not None:
        is_cut = drawing.is_truncated
        whole, cut = np.flatnonzero(is_random & ~is_cut), np.flatnonzero(is_random & is_cut)
        if len(whole):
            token_ids[whole] = draw(rows_of(logits, whole), best[whole].astype(np.float64), drawing[whole])
        if len(cut):
            token_ids[cut] = draw_truncated(rows_of(logits, cut), blocks.maxima[cut], drawing[cut])
    if has_broken:
        token_ids[is_broken] = 0
    return token_ids, is_broken


def draw(logits: Array, best: Doubles, drawing: DrawParams) -> Longs:
    """Draws tokens by inverse CDF in vocabulary order.

    The token is the first whose cumulative probability is above `u`. Ignores truncation.

    logits [n, V] with finite maxima `best` [n].
    """
    blocks = LogitTiles(_weights(logits, best, drawing.temperature))
    rows = np.arange(len(best))
    sums = blocks.sums().cumsum(1)
    target = drawing.u * sums[:, -1]
    block = _first_above(sums, target)
    before = np.where(block > 0, sums[rows, block - 1], 0.0)
    inside = np.maximum(blocks.take(rows, block), 0.0).cumsum(1, dtype=np.float64)  # entries past the end become 0
    return block * BLOCK + _first_above(inside, target - before)


def draw_truncated(logits: Array, maxima: Floats, drawing: DrawParams) -> Longs:
    """As `draw`, from the tokens that the cuts keep, in their order.

    `maxima` [n, B] are those of `LogitTiles(logits)`. What is kept is every token between two logits, so tokens that
    tie with the last one kept are kept too.

    Exact at a fraction of a sort's cost: block maxima give a bound, and only the tokens above it, the candidates, are
    read. For top_p alone the bound is a guess. It holds if the candidates have the requested share of the probability.
    Rows where it does not hold, or with most blocks above the bound, are sorted whole.
    """
    best = maxima.max(1).astype(np.float64)
    mass = np.ones(len(best))
    is_guess = (drawing.of("top_p") < 1) & (drawing.top_k == 0)
    rows = np.flatnonzero(is_guess)
    if len(rows):
        weights = _weights(rows_of(logits, rows), best[rows], drawing.temperature[rows])
        mass[rows] = LogitTiles(weights).sums().cumsum(1)[:, -1]
    totals = RowTotals(mass, _floor(drawing, logits, drawing.temperature))
    bound = _bound(maxima, best, drawing, totals.floor)
    is_near = maxima >= bound[:, None]
    is_whole = is_near.sum(1) * 2 > maxima.shape[1]
    chosen = np.zeros(len(best), np.int64)
    few = np.flatnonzero(~is_whole)
    if len(few):
        found = _candidates(LogitTiles(logits), is_near & ~is_whole[:, None], bound, best, drawing.temperature)
        chosen[few] = _draw_candidates(found, few, drawing, totals)
        covered = np.bincount(found.row, weights=np.exp(found.value), minlength=len(best))
        is_short = covered < drawing.of("top_p") * mass * (1 + SLACK)
        is_whole |= is_guess & is_short & (bound > best + drawing.temperature * totals.floor)
    whole = np.flatnonzero(is_whole)
    if len(whole):
        chosen[whole] = _draw_whole(rows_of(logits, whole), best[whole], drawing[whole], totals[whole])
    return chosen


@dataclass(frozen=True, slots=True)
class RowTotals:
    """What a search for the tokens kept needs to know of all tokens of n rows, besides its candidates."""

    mass: Doubles  # [n] sum of the weights, where the likeliest token has 1; only where top_p is on and top_k is not
    floor: Doubles  # [n] a log-weight that all tokens kept reach, relative to the likeliest

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> RowTotals:
        return RowTotals(self.mass[rows], self.floor[rows])


def _floor(drawing: DrawParams, logits: Array, temperature: Doubles) -> Doubles:
    """The floor of `RowTotals`, of rows whose log-weights are `logits` [n, V] / `temperature` [n].

    top_n_sigma = n keeps a token of logit z where z >= max(z) - n * sigma(z). sigma is the standard deviation of all
    logits that are not -inf, over their number, as in llama.cpp. The tokens kept are the same at each temperature.
    Source: Tang et al., "Top-n-sigma: Not All Logits Are You Need", 2024, arXiv 2411.07641.
    """
    floor = _log(drawing.of("min_p"))
    wanted = drawing.of("top_n_sigma")
    for row in np.flatnonzero(wanted > 0):
        arrays = arrays_of(logits)
        values = arrays.on_host(arrays.floats(logits[row])).astype(np.float64)
        known = values[np.isfinite(values)]
        if len(known):  # else the row is broken
            floor[row] = max(floor[row], -wanted[row] * known.std() / temperature[row])
    return floor


def _bound(maxima: Floats, best: Doubles, drawing: DrawParams, floor: Doubles) -> Doubles:
    """[n] a lower bound for each row on the logits of the kept tokens; for top_p alone a guess.

    top_k: k blocks have a maximum at or above the k-th largest maximum, so at least k tokens are above it. The floor is
    itself a threshold. Where top_p follows top_k, top_p needs all tokens that top_k kept, so only top_k's bound counts.
    """
    num_blocks = maxima.shape[1]
    likely = max(num_blocks // 4, 1)
    by_guess = np.where(drawing.of("top_p") < 1, min(NUM_LIKELY, likely), 0)
    num_wanted = np.where(drawing.top_k > 0, drawing.top_k, by_guess)
    bound = np.full(len(best), LOWEST)
    for k in np.unique(num_wanted).tolist():
        if 0 < k <= num_blocks:
            rows = np.flatnonzero(num_wanted == k)
            bound[rows] = np.partition(maxima[rows], num_blocks - k, axis=1)[:, num_blocks - k]
    by_floor = best + drawing.temperature * (floor - SLACK)
    by_floor[(drawing.top_k > 0) & (drawing.of("top_p") < 1)] = LOWEST
    highest: Doubles = np.maximum(np.maximum(bound, by_floor), LOWEST)
    return highest


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The candidates of several rows, concatenated and sorted by (row, id)."""

    row: Longs
    token_id: Longs
    value: Doubles  # log-weight, 0 for the likeliest of the row


def _candidates(blocks: LogitTiles, is_near: Bools, bound: Doubles, best: Doubles, temperature: Doubles) -> _Candidates:
    """The tokens at or above `bound` in the blocks with `is_near`."""
    rows, near = np.nonzero(is_near)
    found = blocks.take(rows, near)
    at_block, at = np.nonzero(found >= bound[rows][:, None])
    row = rows[at_block]
    return _Candidates(row, near[at_block] * BLOCK + at, (found[at_block, at] - best[row]) / temperature[row])


def _draw_candidates(found: _Candidates, rows: Longs, drawing: DrawParams, totals: RowTotals) -> Longs:
    """One token for each of `rows`.

    Rows with about the same number of candidates are drawn together, so padding costs at most a factor of 8.
    """
    num_rows = len(drawing.u)
    counts = np.bincount(found.row, minlength=num_rows)
    column = np.arange(len(found.row)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.ceil(np.log2(np.maximum(counts, 8)) / 3)
    chosen = np.zeros(num_rows, np.int64)
    for each in np.unique(size[rows]):
        some = rows[size[rows] == each]
        mine = np.flatnonzero(size[found.row] == each)
        place = np.repeat(np.arange(len(some)), counts[some]), column[mine]
        values = np.full((len(some), int(counts[some].max())), -np.inf)
        values[place] = found.value[mine]
        ids = np.zeros(values.shape, np.int64)
        ids[place] = found.token_id[mine]
        chosen[some] = ids[np.arange(len(some)), _draw_from(values, drawing[some], totals[some])]
    return chosen[rows]


def _draw_whole(logits: Array, best: Doubles, drawing: DrawParams, totals: RowTotals) -> Longs:
    """One token for each row, from a full sort.

    Sorts a few rows at a time, since an entry takes about 40 bytes.
    """
    parts, num_rows = [], max(WHOLE_SIZE // logits.shape[1], 1)
    for start in range(0, len(best), num_rows):
        some = slice(start, start + num_rows)
        values = arrays_of(logits).on_host(arrays_of(logits).floats(logits[some])).astype(np.float64)
        values -= best[some, None]
        values /= drawing.temperature[some, None]
        parts.append(_draw_from(values, drawing[some], totals[some]))
    return np.concatenate(parts)


def _draw_from(values: Doubles, drawing: DrawParams, totals: RowTotals) -> Longs:
    """[n] the columns drawn from log-weights [n, W] in vocabulary order; -inf is padding."""
    least, most = kept_range(values, drawing, totals)
    is_kept = values >= least[:, None]
    if most is not None:
        is_kept &= values <= most[:, None]
    sums = np.where(is_kept, np.exp(values), 0.0).cumsum(1)
    return _first_above(sums, drawing.u * sums[:, -1])


def kept_range(values: Doubles, drawing: DrawParams, totals: RowTotals) -> tuple[Doubles, Doubles | None]:
    """[n] the smallest and the largest log-weight that the cuts keep; None: no largest one.

    At least one token is kept.

    values  [n, W]  log-weights relative to the row's largest, which is 0; -inf is padding
    """
    width = values.shape[1]
    rows = np.arange(len(values))
    falling = -np.sort(-values, axis=1)
    has_top_k = drawing.top_k > 0
    least = np.where(has_top_k, falling[rows, np.clip(drawing.top_k, 1, width) - 1], -np.inf)
    weights = np.where(falling >= least[:, None], np.exp(falling), 0.0)
    sums = weights.cumsum(1)
    mass = np.where(has_top_k, sums[:, -1], totals.mass)
    num_kept = ((sums - weights) < (drawing.of("top_p") * mass)[:, None]).sum(1)
    by_top_p = np.where(drawing.of("top_p") < 1, falling[rows, num_kept - 1], -np.inf)
    least = np.maximum(np.maximum(least, by_top_p), totals.floor)
    typical_p = drawing.of("typical_p")
    return _typical_range(values, least, typical_p) if (typical_p < 1).any() else (least, None)


def _typical_range(values: Doubles, least: Doubles, typical_p: Doubles) -> tuple[Doubles, Doubles]:
    """As `kept_range`, of the tokens from `least` [n] on.

    typical_p = p keeps the tokens whose surprise, -log(probability), is nearest to its mean, the entropy: the fewest
    whose joint probability reaches p, and all that are as near as the last. As surprise and log-weight differ by a
    constant of the row, that is the distance of a log-weight from the mean log-weight. Probabilities are those among
    the tokens from `least` on. Source: Meister et al., "Locally Typical Sampling", 2022, arXiv 2202.00666.
    """
    lowest, highest = least.copy(), np.full(len(least), np.inf)
    for row in np.flatnonzero(typical_p < 1):
        kept = np.sort(values[row][np.isfinite(values[row]) & (values[row] >= least[row])])
        if not len(kept):  # the row is broken
            continue
        weights = np.exp(kept)
        apart = np.abs(kept - (weights * kept).sum() / weights.sum())
        order = apart.argsort(kind="stable")
        sums = weights[order].cumsum()
        last = np.count_nonzero(sums < typical_p[row] * sums[-1])
        near = kept[apart <= apart[order[last]]]
        lowest[row], highest[row] = near[0], near[-1]
    return lowest, highest


def truncated(logits: Array, drawing: DrawParams) -> Array:
    """Sets to -inf, in place, the tokens that the cuts remove.

    `logits` [n, V] are already divided by their temperature.
    """
    arrays = arrays_of(logits)
    values = arrays.on_host(logits).astype(np.float64)
    values -= values.max(1, keepdims=True)
    ones = np.ones(len(values))
    least, most = kept_range(values, drawing, RowTotals(np.exp(values).sum(1), _floor(drawing, values, ones)))
    is_cut = values < least[:, None]
    if most is not None:
        is_cut |= values > most[:, None]
    return arrays.hide(logits, arrays.beside(logits, is_cut))


def _weights(logits: Array, best: Doubles, temperature: Doubles) -> Array:
    """exp((logits - best) / temperature), a new [n, V] f32: unnormalized probabilities.

    The largest is 1.
    """
    return arrays_of(logits).weights(logits, best, temperature if (temperature != 1).any() else None)


def _log(x: Doubles) -> Doubles:
    with np.errstate(divide="ignore"):
        logarithms: Doubles = np.log(x)
    return logarithms


def _first_above(sums: Doubles, target: Doubles) -> Longs:
    """[n] the first column of each row at which the running sum is above `target`.

    The sum grows at that column, even if rounding has brought `target` up to the whole sum.
    """
    target = np.minimum(target, np.nextafter(sums[:, -1], 0.0))
    places: Longs = (sums <= target[:, None]).sum(1)
    return places


# -- log-probabilities


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of n tokens, and of the k likeliest alternatives to each."""

    logprobs: Floats  # [n] natural logarithms
    ranks: Longs  # [n] 1 is the likeliest
    top_ids: Longs  # [n, k] likeliest first
    top_logprobs: Floats  # [n, k]


def score(logits: Array, token_ids: Longs, num_top: int) -> TokenScores:
    """Scores `token_ids` [n] by `logits` [n, V] f32, and finds the `num_top` likeliest tokens.

    The rows of `logits` must have finite maxima.
    """
    arrays = arrays_of(logits)
    best = LogitTiles(logits).likeliest()[1].astype(np.float64)
    total = np.log(LogitTiles(arrays.weights(logits, best, None)).sums().cumsum(1)[:, -1])
    chosen = logits[arrays.beside(logits, np.arange(len(token_ids))), arrays.beside(logits, token_ids)]
    ranks = arrays.on_host((logits > chosen[:, None]).sum(1)) + 1
    top_ids, top = arrays.likeliest(logits, num_top)

    def logprob(values: HostArray) -> Floats:
        relative: Floats = ((values.T - best) - total).T.astype(np.float32)
        return relative

    return TokenScores(logprob(arrays.on_host(chosen)), ranks, top_ids, logprob(top))


def top_logprobs(logits: Array, token_ids: Longs, num_top: Longs) -> list[TopLogprobs]:
    """Log-probabilities under `logits` [n, V]: of the chosen tokens and of the likeliest.

    Both `token_ids` and `num_top` are [n].
    """
    scores = score(arrays_of(logits).floats(logits), token_ids, min(int(num_top.max()), logits.shape[1]))
    return top_logprobs_of(scores, num_top)


def top_logprobs_of(scores: TokenScores, num_top: Longs) -> list[TopLogprobs]:
    """`TokenScores` as one object per token, each with its `num_top` [n] likeliest tokens."""
    ids, values = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    chosen = zip(scores.logprobs.tolist(), scores.ranks.tolist(), num_top.tolist(), strict=True)
    return [
        TopLogprobs(logprob, rank, tuple(ids[i][:k]), tuple(values[i][:k]))
        for i, (logprob, rank, k) in enumerate(chosen)
    ]
