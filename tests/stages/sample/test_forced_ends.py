"""Log-probabilities of an end that is forced, as the grammar of the answer allows nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels import kernel_set
from millrace.stages.backends.cuda.triton_chooser import TritonTokenChooser
from millrace.stages.messages import FinishReason
from millrace.stages.sample.sampler import Sampler
from millrace.stages.sample.token_chooser import TokenChooser
from millrace.stages.structured_outputs import StructuredOutputs
from tests.stages.grammar.test_masks import EOS, make
from tests.stages.grants import decode, started

KERNELS = "torch"  # `tests/stages/interpreted_choosing.py` has others
CHOOSERS = ("numpy", "torch", "kernels")
PARAMS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"min_tokens": 9},
    {"ignore_eos": True, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
)


def sampler(chooser: str, mode: Any) -> Sampler:
    kernels = partial(TritonTokenChooser, kernels=kernel_set.load_sampling(KERNELS))
    last_tokens: Any = np.zeros(2, np.int64) if chooser == "numpy" else torch.zeros(2, dtype=torch.int64)
    choosing = kernels if chooser == "kernels" else TokenChooser
    return Sampler(last_tokens, EOS + 1, 64, (EOS,), make(2), logprobs_mode=mode, chooser=choosing)


@pytest.mark.parametrize("params", PARAMS, ids=["ignore_eos", "min_tokens", "drawn"])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_forced_end_is_certain_where_logprobs_are_processed(chooser: str, params: dict[str, Any]) -> None:
    ours = sampler(chooser, "processed_logprobs")
    form = StructuredOutputs(choice=("ab",))
    news = [started(0, structured_outputs=form, logprobs=2, seed=1, **params), started(1, logprobs=2)]
    ours.prepare(news)
    for step, token in enumerate(b"ab"):
        tokens = ours.sample(decode(0, 1, step=step, started=() if step else news), logits(chooser))
        assert tokens.token_ids[0] == token and tokens.logprobs[0].chosen == 0.0
    tokens = ours.sample(decode(0, 1, step=2), logits(chooser))
    assert tokens.token_ids.tolist() == [EOS, 7] and tokens.finishes.tolist() == [FinishReason.STOP, FinishReason.NONE]
    told = tokens.logprobs[0]
    assert (told.chosen, told.rank, told.token_ids[0], told.logprobs) == (0.0, 1, EOS, (0.0, -np.inf))
    assert tokens.logprobs[1].chosen == pytest.approx(float(logits("torch")[1].log_softmax(0)[7]))


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_forced_end_has_the_models_own_logprob_where_they_are_raw(chooser: str) -> None:
    ours = sampler(chooser, "raw_logprobs")
    news = [started(0, structured_outputs=StructuredOutputs(choice=("a",)), logprobs=0, ignore_eos=True)]
    ours.prepare(news)
    ours.sample(decode(0, started=news), logits(chooser)[:1])
    tokens = ours.sample(decode(0, step=1), logits(chooser)[:1])
    right = float(logits("torch")[0].log_softmax(0)[EOS])
    assert tokens.token_ids.tolist() == [EOS] and tokens.logprobs[0].chosen == pytest.approx(right)


def logits(chooser: str) -> Any:
    """[2, V] of numbers that differ; token 7 is the likeliest of both rows."""
    rows = (torch.arange(2 * (EOS + 1)).reshape(2, -1) * 37 % 101 / 20).float()
    rows[:, 7] = 9.0
    return rows.numpy() if chooser == "numpy" else rows
