"""The search for the least and the largest logit that a row's cuts keep; a part of the kernel in `sampling.py`.

Its twin is `bounds_of` in `kernels/reference/sampling.py`. Shapes: logits [V] and group tables of one row; V tokens in
the vocabulary, in groups of 128.

Nothing is sorted. At least k tokens are at or above the k-th largest of the groups' maxima. The tokens at or above it
are the candidates, few more than k, and all are in the groups whose maxima are; only these are read. For top_p the
number of groups is guessed, and four times as many are taken until the candidates hold the probability. The threshold
is then found among the candidates by bisection over the order of floats. Each step ends on a number that occurs, so
about ten steps suffice, and 33 always do. If there are more candidates than fit, their groups are read at each step;
that is rare.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..layout.sampling_rows import AT
from .launch import IS_INTERPRETED
from .vocab_groups import GROUP, as_float, as_number, exp2, ordered

# Groups processed at a time: 1,024 tokens, 4 a thread. More would spill registers, which the interpreter has not.
LISTED = 32 if IS_INTERPRETED else 8
NUM_CANDIDATES = 2048  # most candidates that are kept in registers, 8 a thread
NUM_LIKELY = tl.constexpr(32)  # groups that are read for top_p alone, at first
TOP_K, TOP_P, MIN_P = (tl.constexpr(AT[name]) for name in ("top_k", "top_p", "min_p"))
TOP_N_SIGMA, TYPICAL_P = tl.constexpr(AT["top_n_sigma"]), tl.constexpr(AT["typical_p"])


@triton.jit
def has_cuts(mine):
    """Whether a slot's row asks for any cut."""
    is_cut = (tl.load(mine + TOP_K) > 0) | (as_float(tl.load(mine + TOP_P)) < 1) | (as_float(tl.load(mine + MIN_P)) > 0)
    return is_cut | (as_float(tl.load(mine + TOP_N_SIGMA)) > 0) | (as_float(tl.load(mine + TYPICAL_P)) < 1)


@triton.jit
def kept(
    whole, maxima, lists, candidates, mine, best, temperature, coldness, vocab_size, num_groups,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The least and the largest logit kept, and the number of groups that may hold such logits; they are in `lists`.

    For rows without NaN, whose maximum `best` is finite. `mine` is the slot's row of sampling parameters.
    """
    top_k = tl.minimum(tl.load(mine + TOP_K), vocab_size)
    top_p = as_float(tl.load(mine + TOP_P))
    min_p = as_float(tl.load(mine + MIN_P))
    lowest = best * 0 + float("-inf")
    if min_p > 0:
        lowest = tl.minimum(best + temperature * tl.log(min_p), best)
    top_n_sigma = as_float(tl.load(mine + TOP_N_SIGMA))
    if top_n_sigma > 0:
        lowest = tl.maximum(best - top_n_sigma * _deviation(whole, best, vocab_size, LISTED), lowest)
    if (top_k > 0) | (top_p < 1):
        mass = _mass_of_groups(maxima, num_groups, float("-inf"), best, coldness, BLOCK)
        num_wanted = tl.where(top_k > 0, top_k, NUM_LIKELY)
        bound = best
        num_listed, num_near = 0, 0
        is_short = True
        while is_short:
            bound = _bound(_columns(maxima, num_groups, BLOCK), num_wanted, best)
            if (top_k > 0) | (_mass_of_groups(maxima, num_groups, bound, best, coldness, BLOCK) >= top_p * mass):
                num_listed = _list(lists, maxima, num_groups, bound, BLOCK)
                num_near, mass_near = _gather(
                    whole, lists, num_listed, candidates, bound, best, coldness, vocab_size, LISTED, NUM_CANDIDATES
                )
                is_short = (top_k == 0) & (mass_near < top_p * mass) & (bound > float("-inf"))
            num_wanted = 4 * num_wanted
        if num_near <= NUM_CANDIDATES:
            at = tl.arange(0, NUM_CANDIDATES)
            few = tl.load(candidates + at, mask=at < num_near, other=float("-inf"))
            found = _cut_few(few, bound, best, coldness, top_k, top_p, mass)
        else:
            found = _cut_many(whole, lists, num_listed, bound, best, coldness, top_k, top_p, mass, vocab_size, LISTED)
        lowest = tl.maximum(found, lowest)
    else:
        num_listed = _list(lists, maxima, num_groups, lowest, BLOCK)
    most = best * 0 + float("inf")
    typical_p = as_float(tl.load(mine + TYPICAL_P))
    if typical_p < 1:
        lowest, most = _typical(whole, lists, num_listed, lowest, best, coldness, typical_p, vocab_size, LISTED)
    return lowest, most, num_listed


@triton.jit
def _deviation(whole, best, vocab_size, LISTED: tl.constexpr):
    """The standard deviation of a row's logits that are not -inf. Reads the row twice: sums of squares would cancel."""
    SIZE: tl.constexpr = LISTED * GROUP
    count, mean, squares = best * 0, best * 0, best * 0
    for start in range(0, vocab_size, SIZE):
        token = start + tl.arange(0, SIZE)
        x = tl.load(whole + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        is_number = x > float("-inf")
        count += tl.sum(is_number.to(tl.float32), axis=0)
        mean += tl.sum(tl.where(is_number, x - best, 0.0), axis=0)
    mean = mean / count
    for start in range(0, vocab_size, SIZE):
        token = start + tl.arange(0, SIZE)
        x = tl.load(whole + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        apart = tl.where(x > float("-inf"), x - best - mean, 0.0)
        squares += tl.sum(apart * apart, axis=0)
    return tl.sqrt(squares / count)


@triton.jit
def _columns(maxima, num_groups, BLOCK: tl.constexpr):
    """The maxima of a row's groups. They are read again for each use, as registers are scarce."""
    group = tl.arange(0, BLOCK)
    return tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))


@triton.jit
def _mass_of_groups(maxima, num_groups, bound, best, coldness, BLOCK: tl.constexpr):
    """The mass of the groups with maxima at or above `bound`, where the likeliest token has mass 1."""
    columns, group = _columns(maxima, num_groups, BLOCK), tl.arange(0, BLOCK)
    amounts = tl.load(maxima + num_groups + group, mask=(group < num_groups) & (columns >= bound), other=0.0)
    return tl.sum(exp2((columns - best) * coldness) * amounts, axis=0)


@triton.jit
def _bound(columns, num_wanted, best):
    """A number with between one and two times `num_wanted` columns at or above it, if ties allow.

    -inf if fewer columns hold a number.
    """
    low, high = ordered(best * 0 + float("-inf")).to(tl.int64), ordered(best).to(tl.int64) + 1
    num_low = columns.shape[0] + 0 * num_wanted
    while (num_low > 2 * num_wanted) & (low + 1 < high):
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        num_above = tl.sum((columns >= pivot).to(tl.int32), axis=0)
        if num_above >= num_wanted:
            low, num_low = middle, num_above
        else:
            high = middle
    return as_number(low.to(tl.int32))


# ---- groups and candidates ------------------------------------------------------------------------------------------


@triton.jit
def _list(lists, maxima, num_groups, bound, BLOCK: tl.constexpr):
    """Lists the groups with maxima at or above `bound`, in ascending order, and returns their number."""
    group = tl.arange(0, BLOCK)
    is_listed = (group < num_groups) & (_columns(maxima, num_groups, BLOCK) >= bound)
    tl.debug_barrier()  # other threads may still read the list before
    place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(lists + place, group, mask=is_listed)
    tl.debug_barrier()  # the list is read by other threads
    return tl.sum(is_listed.to(tl.int32), axis=0)


@triton.jit
def listed(whole, lists, start, num_listed, vocab_size, LISTED: tl.constexpr):
    """Logits [LISTED, 128] of the groups from place `start` of the list on, -inf past its end; their numbers."""
    at = start + tl.arange(0, LISTED)
    is_listed = at < num_listed
    group = tl.load(lists + at, mask=is_listed, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(whole + token, mask=is_listed[:, None] & (token < vocab_size), other=float("-inf"))
    return x.to(tl.float32), group, is_listed


@triton.jit
def _gather(
    whole, lists, num_listed, candidates, bound, best, coldness, vocab_size,
    LISTED: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the first candidates of the groups listed; returns the number of all and their mass."""
    num_near, mass_near = 0, 0.0
    for start in range(0, num_listed, LISTED):
        x, _, _ = listed(whole, lists, start, num_listed, vocab_size, LISTED)
        x = tl.reshape(x, [LISTED * GROUP])
        is_near = (x >= bound) & (x > float("-inf"))
        mass_near += tl.sum(tl.where(is_near, exp2((x - best) * coldness), 0.0), axis=0)
        place = num_near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, x, mask=is_near & (place < NUM_CANDIDATES))
        num_near += tl.sum(is_near.to(tl.int32), axis=0)
    tl.debug_barrier()  # candidates are read by other threads
    return num_near, mass_near


# ---- bisection ------------------------------------------------------------------------------------------------------


@triton.jit
def _cut_few(few, bound, best, coldness, top_k, top_p, mass):
    """The threshold of top_k and then top_p, among candidates in registers."""
    weights = exp2((few - best) * coldness)
    lowest = bound
    if top_k > 0:
        lowest = _largest_of_few(few, (few > float("-inf")).to(tl.float32), lowest, best, top_k.to(tl.float32))
        mass = tl.sum(tl.where(few >= lowest, weights, 0.0), axis=0)
    if top_p < 1:
        lowest = _largest_of_few(few, weights, lowest, best, top_p * mass)
    return lowest


@triton.jit
def _largest_of_few(few, weights, lowest, best, wanted):
    """The largest number such that the weights of the candidates at or above it reach `wanted`.

    The caller guarantees that those at or above `lowest` do.
    """
    low, high = ordered(lowest).to(tl.int64), ordered(best).to(tl.int64) + 1  # those at or above `high` do not reach it
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        is_above = few >= pivot
        if tl.sum(tl.where(is_above, weights, 0.0), axis=0) >= wanted:
            above = tl.min(tl.where(is_above, few, float("inf")), axis=0)  # the nearest number; the pivot is above
            low = tl.maximum(middle, ordered(above).to(tl.int64))
        else:
            below = tl.max(tl.where(is_above, float("-inf"), few), axis=0)
            high = tl.minimum(middle, ordered(tl.maximum(below, lowest)).to(tl.int64) + 1)
    return as_number(low.to(tl.int32))


@triton.jit
def _cut_many(
    whole, lists, num_listed, bound, best, coldness, top_k, top_p, mass, vocab_size, LISTED: tl.constexpr
):  # fmt: skip
    """As `_cut_few`, reading the groups listed at each step."""
    lowest = bound
    if top_k > 0:
        lowest = _largest_of_many(
            whole, lists, num_listed, lowest, best, coldness, top_k.to(tl.float32), vocab_size, False, LISTED
        )
        mass = 0.0
        for start in range(0, num_listed, LISTED):
            x, _, _ = listed(whole, lists, start, num_listed, vocab_size, LISTED)
            mass += tl.sum(tl.sum(tl.where(x >= lowest, exp2((x - best) * coldness), 0.0), axis=1), axis=0)
    if top_p < 1:
        lowest = _largest_of_many(
            whole, lists, num_listed, lowest, best, coldness, top_p * mass, vocab_size, True, LISTED
        )
    return lowest


@triton.jit
def _largest_of_many(
    whole, lists, num_listed, lowest, best, coldness, wanted, vocab_size, BY_MASS: tl.constexpr, LISTED: tl.constexpr
):
    """As `_largest_of_few`, by mass or by count."""
    low, high = ordered(lowest).to(tl.int64), ordered(best).to(tl.int64) + 1
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        amount = 0.0
        above, below = best, lowest
        for start in range(0, num_listed, LISTED):
            x, _, _ = listed(whole, lists, start, num_listed, vocab_size, LISTED)
            x = tl.reshape(x, [LISTED * GROUP])
            is_above = x >= pivot
            weights = exp2((x - best) * coldness) if BY_MASS else 1.0
            amount += tl.sum(tl.where(is_above, weights, 0.0), axis=0)
            above = tl.minimum(above, tl.min(tl.where(is_above, x, float("inf")), axis=0))
            below = tl.maximum(below, tl.max(tl.where(is_above, float("-inf"), x), axis=0))
        if amount >= wanted:
            low = tl.maximum(middle, ordered(above).to(tl.int64))
        else:
            high = tl.minimum(middle, ordered(below).to(tl.int64) + 1)
    return as_number(low.to(tl.int32))


# ---- typical tokens -------------------------------------------------------------------------------------------------


@triton.jit
def _typical(whole, lists, num_listed, lowest, best, coldness, typical_p, vocab_size, LISTED: tl.constexpr):
    """The least and the largest logit that typical_p keeps of those at or above `lowest`, reading the groups listed.

    Bisection over the distance from the mean logit, as `_largest_of_many` does over logits.
    """
    mass, mean = best * 0, best * 0
    for start in range(0, num_listed, LISTED):
        x, weights = _kept_of(whole, lists, start, num_listed, lowest, best, coldness, vocab_size, LISTED)
        mass += tl.sum(weights, axis=0)
        mean += tl.sum(weights * tl.where(weights > 0, x - best, 0.0), axis=0)
    mean = best + mean / mass
    # the tokens within `low` do not reach the mass, those within `high` do
    low, high = ordered(best * 0).to(tl.int64) - 1, ordered(best * 0 + float("inf")).to(tl.int64)
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        amount, within, beyond = best * 0, best * 0, best * 0 + float("inf")
        for start in range(0, num_listed, LISTED):
            x, weights = _kept_of(whole, lists, start, num_listed, lowest, best, coldness, vocab_size, LISTED)
            apart = tl.abs(x - mean)
            is_near = apart <= pivot
            amount += tl.sum(tl.where(is_near, weights, 0.0), axis=0)
            within = tl.maximum(within, tl.max(tl.where(is_near & (weights > 0), apart, 0.0), axis=0))
            beyond = tl.minimum(beyond, tl.min(tl.where(is_near | (weights == 0), float("inf"), apart), axis=0))
        if amount >= typical_p * mass:
            high = tl.minimum(middle, ordered(within).to(tl.int64))
        else:
            low = tl.minimum(tl.maximum(middle, ordered(beyond).to(tl.int64) - 1), high - 1)
    near = as_number(high.to(tl.int32))
    least, most = best, best * 0 + float("-inf")
    for start in range(0, num_listed, LISTED):
        x, weights = _kept_of(whole, lists, start, num_listed, lowest, best, coldness, vocab_size, LISTED)
        is_near = (weights > 0) & (tl.abs(x - mean) <= near)
        least = tl.minimum(least, tl.min(tl.where(is_near, x, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(is_near, x, float("-inf")), axis=0))
    return least, most


@triton.jit
def _kept_of(whole, lists, start, num_listed, lowest, best, coldness, vocab_size, LISTED: tl.constexpr):
    """Logits of the groups from place `start` of the list on, and their weights, 0 below `lowest`."""
    x, _, _ = listed(whole, lists, start, num_listed, vocab_size, LISTED)
    x = tl.reshape(x, [LISTED * GROUP])
    return x, tl.where((x >= lowest) & (x > float("-inf")), exp2((x - best) * coldness), 0.0)
