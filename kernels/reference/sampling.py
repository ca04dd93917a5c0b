"""The sampling kernels in plain PyTorch: `SamplingKernels` on a CPU, and the oracle of the Triton kernels.

The protocol in `kernels/kernel_set.py` says what each kernel takes and returns. The twins are in `kernels/triton`:
`sampling.py` (choose, score), `thresholds.py`, `logit_edits.py` (edit, count_tokens).

Shapes: logits [L, V], sampling parameters `rows` [S, 16] i32 (`kernels/layout/sampling_rows.py`), `slots` and
`positions` [L]; L rows of logits, V tokens in the vocabulary, S slots. Everything is computed in f32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layout import sampling_rows

QUARTER = 1024  # 1,024 calls of Philox serve 4,096 tokens, as each call gives four numbers
SERIES_END = 1 / 32  # below it a series is exact for -log(1 - w), while the logarithm loses digits


def choose(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, least: Tensor | None = None) -> Tensor:
    """See `SamplingKernels.choose`."""
    wide = logits.float()
    temperature = _floats(rows, slots, sampling_rows.TEMPERATURE)
    is_random = temperature > 0
    if least is not None:
        wide = wide.masked_fill(is_random[:, None] & (wide < least[:, None]), -torch.inf)
    noise = gumbel(rows, slots, positions, wide.shape[1])
    drawn = wide * (1 / torch.where(is_random, temperature, 1.0))[:, None] + noise
    scores = torch.where(is_random[:, None], drawn, wide)
    is_broken = ~torch.isfinite(wide.amax(1))  # NaN where there is one
    best = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    token_ids = (best == best.amax(1, keepdim=True)).byte().argmax(1)
    return token_ids.masked_fill(is_broken, -1).masked_fill(slots < 0, 0)


def gumbel(rows: Tensor, slots: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [L, V] f32, a function of the row's seed, the position and the token only.

    Philox4x32-10 with the seed as key and the counter (number of the call, position, 0, 0). Token t gets number
    (t // 1024) % 4 of call t // 4096 * 1024 + t % 1024.
    """
    token = torch.arange(vocab_size, device=rows.device)
    call, which = token // (4 * QUARTER) * QUARTER + token % QUARTER, token // QUARTER % 4
    num_calls = vocab_size // (4 * QUARTER) * QUARTER + min(vocab_size % (4 * QUARTER), QUARTER)
    numbers = _philox(
        (torch.arange(num_calls, device=rows.device).expand(len(slots), -1), positions[:, None]),
        (_column(rows, slots, sampling_rows.SEED_LOW)[:, None], _column(rows, slots, sampling_rows.SEED_HIGH)[:, None]),
    )
    w = (torch.stack(numbers)[which, :, call].t().float() + 0.5) * 2.0**-32
    w = w.clamp(max=1 - 2.0**-24)  # in (0, 1)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -torch.where(w < SERIES_END, series, -(1 - w).log()).log()


def _philox(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit numbers for each counter, in i64. Counters are given by their low words; the high words are 0."""
    bits = 0xFFFFFFFF
    c0, c1, c2, c3 = counter[0] & bits, counter[1] & bits, torch.zeros_like(counter[0]), torch.zeros_like(counter[0])
    k0, k1 = key[0] & bits, key[1] & bits
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2 ** 64, which holds all 64 bits
        c0, c1, c2, c3 = (right >> 32 & bits) ^ c1 ^ k0, right & bits, (left >> 32 & bits) ^ c3 ^ k1, left & bits
        k0, k1 = k0 + 0x9E3779B9 & bits, k1 + 0xBB67AE85 & bits
    return c0, c1, c2, c3


def thresholds(logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See `SamplingKernels.thresholds`. Sorts row by row; probabilities are summed in f64."""
    wide = logits.float()
    least = torch.full((len(wide),), -torch.inf, device=wide.device)
    for row, slot in enumerate(slots.tolist()):
        temperature, top_p, min_p = (
            float(rows[slot].view(torch.float32)[column])
            for column in (sampling_rows.TEMPERATURE, sampling_rows.TOP_P, sampling_rows.MIN_P)
        )
        top_k = int(rows[slot, sampling_rows.TOP_K])
        falling = wide[row].nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True).values
        best = float(falling[0])
        if slot < 0 or temperature == 0 or not math.isfinite(best):
            continue
        if top_k > 0:
            least[row] = falling[min(top_k, len(falling)) - 1]
        if top_p < 1:
            weights = ((falling - best) / temperature).exp().double() * (falling >= least[row])
            before = weights.cumsum(0) - weights
            least[row] = falling[max(int((before < top_p * weights.sum()).sum()), 1) - 1]
        if min_p > 0:
            least[row] = max(float(least[row]), min(best + temperature * math.log(min_p), best))
    return least


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
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `SamplingKernels.score`. Sums are in f64."""
    wide, chosen_ids = logits[row_ids].float(), token_ids[row_ids]
    if rows is not None and slots is not None:
        temperature = _floats(rows, slots[row_ids], sampling_rows.TEMPERATURE)
        is_random = (temperature > 0)[:, None]
        if least is not None:
            wide = wide.masked_fill(is_random & (wide < least[row_ids, None]), -torch.inf)
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
