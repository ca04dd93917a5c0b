"""The sampling kernels in plain PyTorch: the oracle of the Triton kernels, which share names and signatures.

L rows of logits, V tokens in the vocabulary, S slots. Logits are f32, bf16 or f16, contiguous in V; all is computed in
f32. `rows` [S, 16] i32 says what each slot asked for (`kernels/layout/sampling_rows.py`); `slots` [L] names each row's
slot, -1 in a row of padding, and `positions` [L] is the absolute position of the token to be chosen; both are i32 or
i64. What happens to a row depends on that row alone: not on the others, on how many there are, nor on where it stands
among them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layout import sampling_rows as asked

QUARTER = 1024  # tokens that share 1,024 calls of Philox are four times as many: each call gives four numbers
SERIES_END = 1 / 32  # below it a series gives -log(1 - w) to the last bit, where the logarithm loses digits


def choose(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, least: Tensor | None = None) -> Tensor:
    """One token for each row: at temperature 0 the likeliest, else one drawn by its probability (Gumbel-max).

    least  [L] f32   tokens with a logit below are not drawn; None = all may be. Of no effect at temperature 0

    Returns [L] i64, token ids. The lowest wins among equals. A row is broken if it has no finite maximum: if it holds a
    NaN or +inf, or nothing but -inf. It gets -1, and padding 0. Logits over their temperature are f32: below about 1e-5
    that leaves no room for noise beside them, and equals go to the lowest id again.
    """
    wide = logits.float()
    temperature = _floats(rows, slots, asked.TEMPERATURE)
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
    """[L, V] f32 Gumbel noise, a function of the row's seed, the position and the token only.

    Philox4x32-10 of key seed and counter (number of the call, position, 0, 0): token t is number (t // 1024) % 4 of
    call t // 4096 * 1024 + t % 1024.
    """
    token = torch.arange(vocab_size, device=rows.device)
    call, which = token // (4 * QUARTER) * QUARTER + token % QUARTER, token // QUARTER % 4
    num_calls = vocab_size // (4 * QUARTER) * QUARTER + min(vocab_size % (4 * QUARTER), QUARTER)
    numbers = _philox(
        (torch.arange(num_calls, device=rows.device).expand(len(slots), -1), positions[:, None]),
        (_column(rows, slots, asked.SEED_LOW)[:, None], _column(rows, slots, asked.SEED_HIGH)[:, None]),
    )
    w = (torch.stack(numbers)[which, :, call].t().float() + 0.5) * 2.0**-32
    w = w.clamp(max=1 - 2.0**-24)  # in (0, 1)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -torch.where(w < SERIES_END, series, -(1 - w).log()).log()


def _philox(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four numbers of 32 bits for each counter (low halves; the high ones are 0), in i64."""
    bits = 0xFFFFFFFF
    c0, c1, c2, c3 = counter[0] & bits, counter[1] & bits, torch.zeros_like(counter[0]), torch.zeros_like(counter[0])
    k0, k1 = key[0] & bits, key[1] & bits
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2 ** 64, which holds all 64 bits
        c0, c1, c2, c3 = (right >> 32 & bits) ^ c1 ^ k0, right & bits, (left >> 32 & bits) ^ c3 ^ k1, left & bits
        k0, k1 = k0 + 0x9E3779B9 & bits, k1 + 0xBB67AE85 & bits
    return c0, c1, c2, c3


def thresholds(logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """[L] f32, in each row the least logit that top_k, then top_p, then min_p keep; -inf where they keep all, in broken
    rows, padding, and at temperature 0. `choose` takes it.

    top_k keeps what is at or above the k-th largest logit. top_p keeps the largest logits whose probability together,
    of what top_k kept, reaches top_p, and what equals the last of them. min_p keeps what is at least min_p times as
    likely as the likeliest. So ties are kept whole.
    """
    wide = logits.float()
    least = torch.full((len(wide),), -torch.inf, device=wide.device)
    for row, slot in enumerate(slots.tolist()):
        temperature, top_p, min_p = (
            float(rows[slot].view(torch.float32)[column]) for column in (asked.TEMPERATURE, asked.TOP_P, asked.MIN_P)
        )
        top_k = int(rows[slot, asked.TOP_K])
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
    """Logits [L, V] f32, new, with what their slots asked for: repetition, frequency and presence penalties, bias, no
    end before its time, and what a grammar allows.

    counts            [S, V] i16   of each token, see `sampling_rows.count`; not read where there is no penalty
    biased_ids, bias  [S, K] i32, f32   the first NUM_BIASED of a row count; no id twice
    end_ids           [S, E] i32   the first NUM_ENDS of a row can not be chosen before END_POSITION
    masks             [M, W] i32   bit t % 32 of word t // 32 allows token t; W >= ceil(V / 32)
    mask_rows         [L] i64      the row of `masks` for each of `logits`; below 0 = anything is allowed
    """
    edited = logits.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        numbers, floats = rows[slot].tolist(), rows[slot].view(torch.float32).tolist()
        repetition, frequency, presence = (floats[i] for i in (asked.REPETITION, asked.FREQUENCY, asked.PRESENCE))
        logit = edited[row]
        if repetition != 1 or frequency != 0 or presence != 0:
            seen = counts[slot].long()
            times = seen & asked.MAX_COUNT
            repeated = torch.where(logit < 0, logit * repetition, logit / repetition)
            logit = torch.where(seen != 0, repeated, logit) - frequency * times - presence * (times > 0)
        if masks is not None and mask_rows is not None and mask_rows[row] >= 0:
            token = torch.arange(logits.shape[1], device=logits.device)
            is_allowed = masks[mask_rows[row]].long()[token // 32] >> token % 32 & 1
            logit = logit.masked_fill(is_allowed == 0, -torch.inf)
        num_biased = numbers[asked.NUM_BIASED]
        logit = logit.index_add(0, biased_ids[slot, :num_biased].long(), bias[slot, :num_biased])
        if int(positions[row]) < numbers[asked.END_POSITION]:
            logit[end_ids[slot, : numbers[asked.NUM_ENDS]].long()] = -torch.inf
        edited[row] = logit
    return edited


def count_tokens(counts: Tensor, rows: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """Each of `slots` got a token: counts it, in place, where the slot has a penalty. No slot stands there twice.

    counts [S, V] i16, token_ids [L] i64.
    """
    off = (asked.REPETITION, 1.0), (asked.FREQUENCY, 0.0), (asked.PRESENCE, 0.0)
    is_penalised = torch.stack([_floats(rows, slots, column) != value for column, value in off]).any(0) & (slots >= 0)
    at = slots[is_penalised], token_ids[is_penalised]
    counts[at] += (counts[at] & asked.MAX_COUNT != asked.MAX_COUNT).to(torch.int16)


def score(
    logits: Tensor,
    row_ids: Tensor,
    token_ids: Tensor,
    num_top: int,
    rows: Tensor | None = None,
    slots: Tensor | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How likely some rows of logits make a token, and which tokens are the likeliest.

    row_ids      [n] i64    into the rows of `logits`, `token_ids`, `slots` and `least`
    token_ids    [L] i64
    num_top                 at most V
    rows, slots             if given, the probabilities are those that are drawn by: at the slot's temperature if that
                            is not 0, and then 0 for what is below `least` [L] f32, if that is given, too

    Returns natural logarithms of the probabilities [n] f32, ranks [n] i64 (1 is the likeliest), and of the `num_top`
    likeliest, the lowest id first among equals, ids [n, k] i64 and logarithms [n, k] f32. Broken rows mean nothing.
    """
    wide, chosen_ids = logits[row_ids].float(), token_ids[row_ids]
    if rows is not None and slots is not None:
        temperature = _floats(rows, slots[row_ids], asked.TEMPERATURE)
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
    """[L] i64"""
    return rows[slots, column].long()


def _floats(rows: Tensor, slots: Tensor, column: int) -> Tensor:
    """[L] f32"""
    return rows[slots, column].view(torch.float32)
