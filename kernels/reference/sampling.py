"""The sampling kernels in plain PyTorch: `SamplingKernels` on a CPU, and the oracle of the Triton kernels.

`kernels/sampling_kernels.py` says what each kernel takes and returns. The twins are in `kernels/triton`:
`sampling.py` (choose, choose_truncated), `thresholds.py`, `token_scores.py` (score), `logit_edits.py` (edit,
count_tokens).

Shapes: logits [L, V], sampling parameters `rows` [S, 16] i32 (`kernels/layout/sampling_rows.py`), `slots` and
`positions` [L]; L rows of logits, V tokens in the vocabulary, S slots. Everything is computed in f32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import sampling_rows
from ..layout.sampling_fields import DRAWS
from ..layout.sampling_rows import AT

GROUP = 128  # tokens of a group, in vocabulary order
TOKEN_NOISE, GROUP_NOISE = 0, 1  # levels of noise
SERIES_END = 1 / 32  # below it a series is exact for -log(1 - w), while the logarithm loses digits


def choose(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """See `SamplingKernels.choose`."""
    return _chosen(logits.float(), rows, slots, positions)


def choose_truncated(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `SamplingKernels.choose_truncated`."""
    wide, bounds = logits.float(), bounds_of(logits, rows, slots)
    return _chosen(wide.masked_fill(_is_outside(wide, bounds), -torch.inf), rows, slots, positions), bounds


def _is_outside(wide: Tensor, bounds: Tensor) -> Tensor:
    return (wide < bounds[:, :1]) | (wide > bounds[:, 1:])


def _chosen(wide: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    num_rows, vocab_size = wide.shape
    best = wide.amax(1)  # NaN where there is one
    temperature = _floats(rows, slots, sampling_rows.TEMPERATURE)
    is_random = temperature > 0
    relative = (wide - best[:, None]) / torch.where(is_random, temperature, 1.0)[:, None]
    relative = torch.nn.functional.pad(relative, (0, -vocab_size % GROUP), value=-torch.inf)
    num_groups = relative.shape[1] // GROUP
    groups = relative.nan_to_num(-torch.inf, torch.inf, -torch.inf).view(num_rows, num_groups, GROUP)
    group_ids = torch.arange(num_groups, device=wide.device).expand(num_rows, -1)
    masses = groups.exp().sum(2).log() + gumbel(rows, slots, positions, group_ids, GROUP_NOISE)
    group = masses.argmax(1)
    inside = group[:, None] * GROUP + torch.arange(GROUP, device=wide.device)
    scores = relative.gather(1, inside) + gumbel(rows, slots, positions, inside, TOKEN_NOISE)
    drawn = inside.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    token_ids = torch.where(is_random, drawn, wide.argmax(1))
    return token_ids.masked_fill(~best.isfinite(), -1).masked_fill(slots < 0, 0)


def gumbel(rows: Tensor, slots: Tensor, positions: Tensor, index: Tensor, level: int) -> Tensor:
    """Gumbel noise [L, n] f32 of the tokens or, by `level`, of the groups `index` [L, n].

    A function of the row's seed, the position, the level and the index only. So two models with one vocabulary draw
    with equal noise at equal seeds and positions, even if their rows of logits are padded to different sizes.

    Philox4x32-10 with the seed as key and the counter (number of the call, position, level, 0). Index i gets number
    (i // 128) % 4 of call i // 512 * 128 + i % 128.
    """
    call, which = index // (4 * GROUP) * GROUP + index % GROUP, index // GROUP % 4
    numbers = _philox(
        (call, positions[:, None], torch.full_like(call, level)),
        (_column(rows, slots, sampling_rows.SEED_LOW)[:, None], _column(rows, slots, sampling_rows.SEED_HIGH)[:, None]),
    )
    w = (torch.stack(numbers).gather(0, which[None])[0].float() + 0.5) * 2.0**-32
    w = w.clamp(max=1 - 2.0**-24)  # in (0, 1)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -torch.where(w < SERIES_END, series, -(1 - w).log()).log()


def _philox(counter: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit numbers for each counter, in i64. Counters are given by three words; the fourth is 0."""
    bits = 0xFFFFFFFF
    c0, c1, c2 = (word & bits for word in counter)
    c3 = torch.zeros_like(c0)
    k0, k1 = key[0] & bits, key[1] & bits
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2 ** 64, which holds all 64 bits
        c0, c1, c2, c3 = (right >> 32 & bits) ^ c1 ^ k0, right & bits, (left >> 32 & bits) ^ c3 ^ k1, left & bits
        k0, k1 = k0 + 0x9E3779B9 & bits, k1 + 0xBB67AE85 & bits
    return c0, c1, c2, c3


def bounds_of(logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """The bounds of `choose_truncated`. Sorts row by row; probabilities are summed in f64."""
    wide = logits.float()
    bounds = torch.tensor([[-torch.inf, torch.inf]], device=wide.device).repeat(len(wide), 1)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and wide[row].max().isfinite():
            floats = rows[slot].view(torch.float32).tolist()
            draw = {field.name: floats[AT[field.name]] for field in DRAWS}
            draw["top_k"] = int(rows[slot, AT["top_k"]])
            if draw["temperature"] > 0:
                bounds[row] = torch.tensor(_bounds(wide[row], draw))
    return bounds


def _bounds(logits: Tensor, draw: Mapping[str, float]) -> tuple[float, float]:
    """The least and the largest of the logits [V] that are kept, by the numbers of a draw."""
    temperature, top_k, top_p, min_p = (draw[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    falling, least = logits.sort(descending=True).values, -math.inf
    best = float(falling[0])
    if top_k > 0:
        least = float(falling[min(int(top_k), len(falling)) - 1])
    if top_p < 1:
        weights = ((falling - best) / temperature).exp().double() * (falling >= least)
        before = weights.cumsum(0) - weights
        least = float(falling[max(int((before < top_p * weights.sum()).sum()), 1) - 1])
    if min_p > 0:
        least = max(least, min(best + temperature * math.log(min_p), best))
    if draw["top_n_sigma"] > 0:
        spread = logits[logits > -torch.inf].double().std(correction=0)
        least = max(least, best - draw["top_n_sigma"] * float(spread))
    return _typical_bounds(logits, least, draw) if draw["typical_p"] < 1 else (least, math.inf)


def _typical_bounds(logits: Tensor, least: float, draw: Mapping[str, float]) -> tuple[float, float]:
    """See `_typical_range` in `stages/sample/sampling_math.py`."""
    kept = logits[(logits >= least) & logits.isfinite()].double()
    weights = ((kept - kept.max()) / draw["temperature"]).exp()
    apart = (kept - (weights * kept).sum() / weights.sum()).abs()
    order = apart.argsort(stable=True)
    sums = weights[order].cumsum(0)
    last = int((sums < draw["typical_p"] * sums[-1]).sum())
    near = kept[apart <= apart[order[last]]]
    return float(near.min()), float(near.max())


def edit(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    biased_ids: Tensor,
    bias: Tensor,
    end_ids: Tensor,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """See `SamplingKernels.edit`."""
    edited = logits.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        numbers, floats = rows[slot].tolist(), rows[slot].view(torch.float32).tolist()
        repetition, frequency, presence = (
            floats[i] for i in (sampling_rows.REPETITION, sampling_rows.FREQUENCY, sampling_rows.PRESENCE)
        )
        logit = edited[row]
        if repetition != 1 or frequency != 0 or presence != 0:
            seen = counts[slot].long()
            times = seen & sampling_rows.MAX_COUNT
            repeated = torch.where(logit < 0, logit * repetition, logit / repetition)
            logit = torch.where(seen != 0, repeated, logit) - frequency * times - presence * (times > 0)
        if masks is not None and mask_rows is not None and mask_rows[row] >= 0:
            token = torch.arange(logits.shape[1], device=logits.device)
            is_allowed = masks[mask_rows[row]].long()[token // 32] >> token % 32 & 1
            logit = logit.masked_fill(is_allowed == 0, -torch.inf)
        num_biased = numbers[sampling_rows.NUM_BIASED]
        logit = logit.index_add(0, biased_ids[slot, :num_biased].long(), bias[slot, :num_biased])
        if int(positions[row]) < numbers[sampling_rows.END_POSITION]:
            logit[end_ids[slot, : numbers[sampling_rows.NUM_ENDS]].long()] = -torch.inf
        edited[row] = logit
    return edited


def force(chosen: Tensor, forced: Tensor) -> None:
    """See `SamplingKernels.force`."""
    wanted = forced.long()
    kept = torch.where((wanted >= 0) & (chosen >= 0), wanted, chosen)
    chosen.copy_(torch.where(wanted < -1, -2 - wanted, kept))


def count_tokens(counts: Tensor, rows: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """See `SamplingKernels.count_tokens`."""
    off = (sampling_rows.REPETITION, 1.0), (sampling_rows.FREQUENCY, 0.0), (sampling_rows.PRESENCE, 0.0)
    is_penalised = torch.stack([_floats(rows, slots, column) != value for column, value in off]).any(0) & (slots >= 0)
    at = slots[is_penalised], token_ids[is_penalised]
    counts[at] += (counts[at] & sampling_rows.MAX_COUNT != sampling_rows.MAX_COUNT).to(torch.int16)


def score(
    logits: Tensor,
    row_ids: Tensor,
    token_ids: Tensor,
    num_top: int,
    rows: Tensor | None = None,
    slots: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `SamplingKernels.score`. Sums are in f64."""
    wide, chosen_ids = logits[row_ids].float(), token_ids[row_ids]
    if rows is not None and slots is not None:
        temperature = _floats(rows, slots[row_ids], sampling_rows.TEMPERATURE)
        is_random = (temperature > 0)[:, None]
        if bounds is not None:
            wide = wide.masked_fill(is_random & _is_outside(wide, bounds[row_ids]), -torch.inf)
        wide = torch.where(is_random, wide / temperature[:, None], wide)
    total = wide.double().logsumexp(1)
    chosen = wide.gather(1, chosen_ids[:, None])
    values, ids = wide.sort(dim=1, descending=True, stable=True)
    relative = [(x.double() - total[:, None]).float() for x in (chosen, values[:, :num_top])]
    return relative[0][:, 0], (wide > chosen).sum(1) + 1, ids[:, :num_top], relative[1]


def _column(rows: Tensor, slots: Tensor, column: int) -> Tensor:
    """One column of the rows of `slots`, [L] i64."""
    return rows[slots, column].long()


def _floats(rows: Tensor, slots: Tensor, column: int) -> Tensor:
    """One column of the rows of `slots`, [L] f32."""
    return rows[slots, column].view(torch.float32)
