"""One kernel on one set of inputs: how it is launched, what it should have written, and what it must move and compute.

The same trials are checked, at small and odd sizes, and timed, at those of real models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.kernels.checks.roofline import LaunchCost

Tensors = dict[str, Tensor]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of 1 + |number|: some roundings


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A kernel may be launched again and again, and then find what it has written as its inputs."""

    name: str
    launch: Callable[[], Tensors]  # what it wrote
    wrong: Callable[[Tensors], Iterator[str]]  # what the first launch wrote that it should not have, in sentences
    cost: LaunchCost


def check(trial: Trial) -> list[str]:
    """What is wrong after one launch, which found poison wherever nothing had been written."""
    with poisoned_memory():
        got = trial.launch()
    return [f"{trial.name}: {sentence}" for sentence in trial.wrong(got)]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, those of whole numbers the largest."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic: not needed here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def far(
    name: str, got: Tensor, want: Tensor, tolerance: float | None = None, slack: Tensor | None = None
) -> Iterator[str]:
    """A sentence if `got` is not near what float64 gives; NaN is near nothing, and infinities only to themselves.
    `slack`, of the same shape, is what each number may be off besides."""
    allowed = TOLERANCES[got.dtype] if tolerance is None else tolerance
    if got.shape != want.shape:
        yield f"{name} is {list(got.shape)}, and should be {list(want.shape)}"
        return
    mine, his = got.double(), want.double().to(got.device)
    room = 0.0 if slack is None else slack.to(got.device)
    error = torch.where(mine == his, 0.0, ((mine - his).abs() - room) / (1 + his.abs()))
    is_far = ~(error <= allowed)
    if bool(is_far.any()):
        worst = error.nan_to_num(torch.inf).max().item()
        yield f"{int(is_far.sum())} of {error.numel()} numbers of {name} are off by up to {worst:.3g}, over {allowed:g}"


def unlike(name: str, got: Tensor, want: Tensor) -> Iterator[str]:
    """A sentence if they are not equal."""
    if not torch.equal(got.cpu(), want.cpu()):
        yield f"{name} is not what it should be"


def unchecked(got: Tensors) -> Iterator[str]:
    """At sizes that are timed only."""
    return iter(())
