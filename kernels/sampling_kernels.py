"""The interface of the sampling kernels of a backend. Letters in shapes: see `kernel_set.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SamplingKernels(Protocol):
    """The kernels that edit logits, choose tokens from them and score tokens.

    logits     [L, V]          f32, bf16 or f16, contiguous in V; computed on in f32
    rows       [S, WIDTH] i32  each slot's sampling parameters, as `kernels/layout/sampling_rows.py` packs them
    slots      [L] i32 | i64   the slot of each row of logits; -1 is a padding row
    positions  [L] i32 | i64   the absolute position of the token to choose

    `choose`, `choose_truncated` and `score` read only the beginning of a slot's row, its draw.
    The result for a row depends on that row alone: not on the number, the content or the order of the others. A row is
    *broken* if it has no finite maximum: if it holds NaN or +inf, or only -inf.
    """

    def choose(self, logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """One token for each row: the likeliest at temperature 0, else one drawn by its probability.

        Cuts are ignored. A token is drawn in two steps, both by the maximum of log-probability and
        Gumbel noise: a group of 128 tokens, then one token in it. The noise is a function of seed, position and group
        or token (`gumbel` in `kernels/reference/sampling.py`).

        Returns token ids [L] i64, the lowest of the likeliest at temperature 0; -1 for a broken row, 0 for padding.
        """

    def choose_truncated(self, logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `choose`, from the tokens that the cuts keep, in their order; and the least and the largest logit kept.

        top_k keeps the logits at or above the k-th largest. Of those, renormalised, top_p keeps the fewest of the
        largest whose joint probability reaches top_p, and all equals of the last. min_p keeps tokens at least min_p
        times as likely as the likeliest. The others follow, as
        `_floor` and `_typical_range` in `stages/sample/sampling_math.py` say. So ties are kept whole.

        Returns token ids [L] i64 as `choose` does, and the bounds [L, 2] f32 of the logits kept: -inf and inf where all
        are, in broken rows, in padding, and at temperature 0.
        """

    def edit(
        self,
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
        """Applies penalties, the grammar's mask, logit bias and the minimum length, in this order.

        counts      [S, V] i16   occurrences of each token (`sampling_rows.count`); read only where a penalty is set
        biased_ids  [S, K] i32   the first NUM_BIASED of a row count; no id twice
        bias        [S, K] f32   added to the logits of `biased_ids`
        end_ids     [S, E] i32   the first NUM_ENDS of a row get -inf before END_POSITION
        masks       [W', W] i32  bit t % 32 of word t // 32 allows token t; W >= ceil(V / 32)
        mask_rows   [L] i32|i64  the row of `masks` for each row of logits; negative = every token is allowed

        Returns new logits, [L, V] f32. `masks` and `mask_rows` are given together.
        """

    def force(self, chosen: Tensor, forced: Tensor) -> None:
        """Replaces chosen tokens in place.

        chosen  [L] i64   from `choose`; negative = the row is broken
        forced  [L] i32   the token of the row instead, which a broken row does not get; -1 = none; -2 - t = token t,
                          which a broken row gets, too
        """

    def count_tokens(self, counts: Tensor, rows: Tensor, slots: Tensor, token_ids: Tensor) -> None:
        """Counts one token for each of `slots` in place, where the slot has a penalty. No slot occurs twice.

        counts     [S, V] i16   stops at `sampling_rows.MAX_COUNT`
        token_ids  [L] i64
        """

    def score(
        self,
        logits: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        num_top: int,
        rows: Tensor | None = None,
        slots: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The log-probability and rank of a token in some rows of logits, and the likeliest tokens there.

        row_ids      [n] i64   into the rows of `logits`, `token_ids`, `slots` and `bounds`
        token_ids    [L] i64
        num_top                k, at most V
        rows, slots            if given, probabilities are those of the draw: at the slot's temperature, unless that is
                               0, and 0 for tokens outside of `bounds` [L, 2] f32, if those are given too

        Returns log-probabilities [n] f32 and ranks [n] i64 (1 is the likeliest) of the tokens; then ids [n, k] i64 and
        log-probabilities [n, k] f32 of the likeliest, the lowest id first among equals. A broken row's are undefined.
        """
