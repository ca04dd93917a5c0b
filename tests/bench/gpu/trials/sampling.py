"""Trials of the kernels that choose tokens. What is drawn must be the likeliest with noise, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from millrace.kernels.checks import roofline_sampling
from millrace.kernels.kernel_set import SamplingKernels
from millrace.kernels.layout import sampling_rows
from millrace.kernels.reference import sampling as reference_sampling
from millrace.kernels.reference.sampling import GROUP
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unlike

NOISE_ROUNDING = 1e-4  # of 1 + |score|: two logarithms in f32, near 1 where they lose digits
MASS_ROUNDING = 1e-4  # of a row's probability, summed in f32
NUM_BIASED = 8


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 6},
    {
        "temperature": 1.3,
        "min_p": 0.02,
        "seed": 7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
)


def sampling_trials(
    kernels: SamplingKernels,
    num_rows: int,
    vocab_size: int,
    dtype: torch.dtype,
    draw: Generator,
    asked: tuple[dict[str, Any], ...] = ASKED,
) -> list[Trial]:
    """Each kernel over rows that ask, in turn, for each of `asked`."""
    device = draw.device
    logits = (torch.randn(num_rows, vocab_size, generator=draw, device=device) * 3).to(dtype)
    rows = torch.from_numpy(np.stack([sampling_rows.pack(**asked[row % len(asked)]) for row in range(num_rows)])).to(
        device
    )
    slots, positions = (torch.arange(num_rows, device=device) + first for first in (0, 9))
    bounds = _twin(reference_sampling.bounds_of, logits, rows, slots)
    kinds = [asked[row % len(asked)] for row in range(num_rows)]
    num_penalised = sum("repetition_penalty" in kind for kind in kinds)
    size, name = dtype.itemsize, f"of {num_rows} x {vocab_size}"
    counts = torch.randint(0, 3, (num_rows, vocab_size), generator=draw, device=device).short()
    before = counts.clone()
    biased = torch.stack([torch.randperm(vocab_size, generator=draw, device=device)[:NUM_BIASED] for _ in slots]).int()
    bias = torch.randn(num_rows, NUM_BIASED, generator=draw, device=device)
    ends = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
    chosen = torch.randint(0, vocab_size, (num_rows,), generator=draw, device=device)

    def chosen_well(token_ids: Tensor, kept: Tensor | None) -> Iterator[str]:
        is_wrong = token_ids.cpu() < 0
        taken = token_ids.cpu().clamp(0, vocab_size - 1)[:, None]
        masses, scores = _scores(logits, rows, slots, positions, kept, taken // GROUP)
        for score, place in ((masses, taken // GROUP), (scores, taken % GROUP)):
            best = score.max(1).values
            is_wrong |= ~(score.gather(1, place)[:, 0] >= best - NOISE_ROUNDING * (1 + best.abs()))
        if bool(is_wrong.any()):
            yield f"rows {is_wrong.nonzero()[:, 0].tolist()[:8]} did not get their likeliest token"

    def cut_well(got: Tensors) -> Iterator[str]:
        mass = _mass_between(logits, rows, slots, got["bounds"].cpu(), bounds.cpu())
        is_wrong = ~(mass <= MASS_ROUNDING)
        if bool(is_wrong.any()):
            yield f"rows {is_wrong.nonzero()[:, 0].tolist()[:8]} keep other tokens than a sort does"
        yield from chosen_well(got["ids"], got["bounds"])

    def counted(got: Tensors) -> Iterator[str]:
        want = before.cpu().clone()
        reference_sampling.count_tokens(want, rows.cpu(), slots.cpu(), chosen.cpu())
        yield from unlike("the counts", got["counts"], want)

    def scored(got: Tensors) -> Iterator[str]:
        want = reference_sampling.score(logits.cpu(), slots.cpu(), chosen.cpu(), 5)
        for part, mine, his in zip(("logprobs", "ranks", "ids", "top logprobs"), got.values(), want, strict=True):
            if part in ("ranks", "ids"):
                yield from unlike(part, mine, his)
            else:
                yield from far(part, mine, his, 1e-4)

    def counts_one_more() -> Tensors:
        kernels.count_tokens(counts, rows, slots, chosen)
        return {"counts": counts}

    edit_inputs = (logits, rows, slots, positions, before, biased, bias, ends)
    return [
        Trial(
            f"choose {name}",
            lambda: {"ids": kernels.choose(logits, rows, slots, positions)},
            lambda got: chosen_well(got["ids"], None),
            roofline_sampling.choose(num_rows, vocab_size, size),
        ),
        Trial(
            f"choose_truncated {name}",
            lambda: dict(zip(("ids", "bounds"), kernels.choose_truncated(logits, rows, slots, positions), strict=True)),
            cut_well,
            roofline_sampling.choose_truncated(num_rows, vocab_size, size),
        ),
        Trial(
            f"edit {name}",
            lambda: {"edited": kernels.edit(*edit_inputs)},
            lambda got: far("the logits", got["edited"], _twin(reference_sampling.edit, *edit_inputs), 1e-5),
            roofline_sampling.edit(num_rows, vocab_size, size, num_penalised, 0, [0] * num_rows),
        ),
        Trial(
            f"count_tokens {name}",
            counts_one_more,
            counted,
            roofline_sampling.count_tokens(num_rows, num_penalised),
        ),
        Trial(
            f"score {name}",
            lambda: dict(zip("abcd", kernels.score(logits, slots, chosen, 5), strict=True)),
            scored,
            roofline_sampling.score(num_rows, vocab_size, size, 5),
        ),
    ]


def _twin(kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What the twin makes of them on the host, where its loops over rows do not wait."""
    return kernel(*(one.cpu() for one in inputs)).to(inputs[0].device)


def _scores(
    logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, bounds: Tensor | None, group: Tensor
) -> tuple[Tensor, Tensor]:
    """What groups [L, G], and the tokens of one group [L, 1] of each row [L, 128], are ranked by: f64, on the host."""
    wide, rows, slots, positions = logits.double().cpu(), rows.cpu(), slots.cpu(), positions.cpu()
    temperature = rows[slots].view(torch.float32)[:, sampling_rows.TEMPERATURE].double()
    is_random = (temperature > 0)[:, None]
    if bounds is not None:
        wide = wide.masked_fill(is_random & ~_is_within(wide, bounds.cpu()), -torch.inf)
    wide = wide / torch.where(temperature > 0, temperature, 1.0)[:, None]
    groups = torch.nn.functional.pad(wide, (0, -wide.shape[1] % GROUP), value=-torch.inf).view(len(wide), -1, GROUP)
    masses = torch.where(is_random, groups.logsumexp(2), groups.amax(2))
    tokens = groups[torch.arange(len(wide)), group[:, 0]]

    def noise(index: Tensor, level: int) -> Tensor:
        return reference_sampling.gumbel(rows, slots, positions, index, level).double() * is_random

    masses += noise(torch.arange(groups.shape[1]).expand(len(wide), -1), reference_sampling.GROUP_NOISE)
    return masses, tokens + noise(group * GROUP + torch.arange(GROUP), reference_sampling.TOKEN_NOISE)


def _mass_between(logits: Tensor, rows: Tensor, slots: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """[L] f64: the probability, at each row's temperature, of what one pair of bounds keeps and the other does not."""
    wide, asked = logits.double().cpu(), rows.cpu()[slots.cpu()]
    temperature = asked.view(torch.float32)[:, sampling_rows.TEMPERATURE].double()
    shares = (wide / torch.where(temperature > 0, temperature, 1.0)[:, None]).softmax(1)
    return (shares * (_is_within(wide, one) != _is_within(wide, other))).sum(1)


def _is_within(wide: Tensor, bounds: Tensor) -> Tensor:
    """[L, V] which logits lie within a row's bounds, [L, 2]."""
    return (wide >= bounds[:, :1].double()) & (wide <= bounds[:, 1:].double())
