"""The sampler with Triton kernels, in Triton's interpreter: all tests of `tests/stages/sample/test_sampler.py`, and a
comparison with the plain sampler where nothing is drawn at random.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest` of this file.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.triton import launch as triton_launch
from millrace.stages.backends.cuda.triton_chooser import TritonTokenChooser
from millrace.stages.backends.memory_needs import device_sampler_bytes
from millrace.stages.grammar.masks import AllowedTokens
from millrace.stages.sample.sampler import Sampler
from millrace.stages.sample.slot_params import SlotParams
from millrace.stages.sample.token_chooser import SampledRows, TokenChooser, any_of
from tests.stages.device.test_arrays import any_params, same
from tests.stages.grants import decode, started
from tests.stages.sample import test_forced_ends, test_sampler
from tests.stages.sample.test_sampler import *  # noqa: F403  (its tests, which look for `CHOOSING` over there)

BY_TRITON = partial(TritonTokenChooser, kernels=kernel_set.load_sampling("triton"))

del test_seeds_make_choices_of_one_prompt_differ  # noqa: F821  (64 rows; the kernel has its own test)


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"
    monkeypatch.setattr(test_sampler, "CHOOSING", BY_TRITON)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.5}])
@pytest.mark.parametrize("bad", ["one nan", "all nan", "all -inf", "one inf"])
def test_a_row_without_numbers_ends_alone(bad: str, params: dict[str, Any]) -> None:
    test_sampler.test_a_row_without_numbers_ends_alone(bad, 100, params)


@pytest.mark.parametrize("params", test_forced_ends.PARAMS)
def test_a_forced_end_is_certain(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_forced_ends, "KERNELS", "triton")
    test_forced_ends.test_a_forced_end_is_certain_where_logprobs_are_processed("kernels", params)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 5}, {"presence_penalty": 1.0}, {"logprobs": 1}])
def test_half_precision_logits_do(params: dict[str, Any]) -> None:
    test_sampler.test_half_precision_logits_do(torch.float16, params)  # bfloat16 is not for the interpreter


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_greedy_rows_get_the_tokens_and_logprobs_of_the_other_sampler_in_all_cases(mode: Any) -> None:
    vocab, num_slots, rng = 300, 6, np.random.default_rng(0)
    ours, theirs = (
        Sampler(torch.zeros(num_slots, dtype=torch.int64), vocab, 64, (vocab - 1,), logprobs_mode=mode, **more)
        for more in ({"chooser": BY_TRITON}, {})
    )
    prompts = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(num_slots)]
    news = [started(i, p, **(any_params(rng, vocab) | {"temperature": 0.0})) for i, p in enumerate(prompts)]
    for step in range(4):
        slots = list(range(num_slots)) if step == 0 else sorted(rng.permutation(num_slots)[:4].tolist())
        logits = torch.from_numpy((rng.standard_normal((len(slots), vocab)) * 3).astype(np.float32))
        if step == 3:
            logits[0] = torch.nan
        this = decode(*slots, step=step, started=news if step == 0 else ())
        same(ours.sample(this, logits.clone()), theirs.sample(this, logits.clone()))
        assert torch.equal(ours.last_tokens, theirs.last_tokens)


def test_what_is_drawn_is_what_the_other_sampler_would_keep_and_as_likely() -> None:
    num_slots = 8
    logits = torch.from_numpy((np.random.default_rng(0).standard_normal((num_slots, 300)) * 2).astype(np.float32))
    cut = {
        "temperature": 1.5,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "top_n_sigma": 2.0,
        "typical_p": 0.7,
        "logprobs": 20,
    }
    news = [started(slot, seed=slot, **cut) for slot in range(num_slots)]
    drawn = []
    for chooser in (BY_TRITON, TokenChooser):
        last_tokens = torch.zeros(num_slots, dtype=torch.int64)
        sampler = Sampler(last_tokens, 300, 64, logprobs_mode="processed_logprobs", chooser=chooser)
        drawn.append(sampler.sample(decode(*range(num_slots), started=news), logits.clone()))
    ours, theirs = drawn
    assert ours.token_ids.tolist() != theirs.token_ids.tolist()  # another noise
    for row, token_id in enumerate(ours.token_ids.tolist()):
        kept = dict(zip(theirs.logprobs[row].token_ids, theirs.logprobs[row].logprobs, strict=True))
        assert ours.logprobs[row].chosen == pytest.approx(kept[token_id], abs=1e-5)


@pytest.mark.parametrize("has_processor", [False, True])
def test_what_a_grammar_forbids_is_not_chosen(has_processor: bool) -> None:
    masks = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, (2, 4)).astype(np.int32)
    masks &= masks << 1 & masks << 3  # few bits
    found = []
    for chooser in (BY_TRITON, TokenChooser):
        sampler = Sampler(torch.zeros(3, dtype=torch.int64), 100, 64, chooser=chooser)
        if has_processor:
            sampler.use(test_sampler.Witness())
        for slot in range(3):
            sampler.table.start(started(slot))
            sampler.chooser.start(started(slot))
        slots = np.array([2, 0, 1])
        rows = SampledRows(slots, np.zeros(3, np.intp), sampler.table.needs[slots], any_of(sampler.table.needs[slots]))
        allowed = AllowedTokens(np.array([0, 2]), masks, np.arange(2))
        choice = sampler.chooser.choose(rows, test_sampler.noise(3, 100), allowed)
        found.append(choice.token_ids.tolist())
    assert found[0] == found[1]
    for mask, token_id in zip(masks, (found[0][0], found[0][2]), strict=True):
        assert mask[token_id // 32] >> token_id % 32 & 1


def test_the_tables_on_the_device_take_what_the_sizing_counts() -> None:
    table = SlotParams(4, 100, 64, ())
    held = vars(BY_TRITON(table, torch.zeros(4, dtype=torch.int64), "raw_logprobs")).values()
    num_bytes = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))
    assert num_bytes == device_sampler_bytes(4, 100, 4)
