"""The choice of sampling kernels: from Triton, or their PyTorch twins. What each does is in
`kernels/reference/sampling.py`.

Triton is imported only when chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .kernel_set import BackendName
from .reference import sampling as reference_sampling


class Choose(Protocol):
    """`reference_sampling.choose`."""

    def __call__(
        self, logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, least: Tensor | None = None
    ) -> Tensor: ...


class Edit(Protocol):
    """`reference_sampling.edit`."""

    def __call__(
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
    ) -> Tensor: ...


class Score(Protocol):
    """`reference_sampling.score`."""

    def __call__(
        self,
        logits: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        num_top: int,
        rows: Tensor | None = None,
        slots: Tensor | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """Each does what its namesake in `kernels/reference/sampling.py` says."""

    choose: Choose
    thresholds: Callable[[Tensor, Tensor, Tensor], Tensor]
    edit: Edit
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    score: Score


def load(name: BackendName) -> SamplingKernels:
    """The kernels of that name. Whether they run here, `backend.load` has said."""
    if name == "torch":
        twins = reference_sampling
        return SamplingKernels(twins.choose, twins.thresholds, twins.edit, twins.count_tokens, twins.score)
    from .triton import logit_edits as triton_edits
    from .triton import sampling as triton_sampling
    from .triton import thresholds as triton_thresholds

    return SamplingKernels(
        triton_sampling.choose,
        triton_thresholds.thresholds,
        triton_edits.edit,
        triton_edits.count_tokens,
        triton_sampling.score,
    )
