"""The bytes of the kernels' costs against the bytes that launches touch, recorded in Triton's interpreter.

Bytes that are read twice, or written and read again, count once in each direction, as in a cost.

Run by `tests/kernels/triton/test_triton_interpreted.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from millrace.kernels.checks import roofline, roofline_sampling
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import HeadNorms
from millrace.kernels.triton import attention_prologue as triton_prologue
from millrace.kernels.triton import block_copy as triton_copy
from millrace.kernels.triton import layers as triton_layers
from millrace.kernels.triton import logit_edits as triton_edits
from millrace.kernels.triton import sampling as triton_sampling
from millrace.kernels.triton import step_state as triton_step
from millrace.kernels.triton import token_scores as triton_scores
from tests.bench.gpu.trials.steps import step_trials
from tests.kernels.sampling_cases import noise, table


@dataclass
class Traffic:
    """What launches touched: bytes by address, apart for loads and stores."""

    loaded: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(self.loaded.values()) + sum(self.stored.values())

    def note(self, touched: dict[int, int], pointers: Any, mask: Any) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth, 8) // 8
        touched |= dict.fromkeys(np.asarray(pointers.data)[np.asarray(mask.data, bool)].ravel().tolist(), size)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        traffic.note(traffic.loaded, pointers, mask)
        return load(self, pointers, mask, *more)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        traffic.note(traffic.stored, pointers, mask)
        return store(self, pointers, value, mask, *more)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", noted_load)
        patched.setattr(InterpreterBuilder, "create_masked_store", noted_store)
        yield traffic


def assert_counts(
    monkeypatch: pytest.MonkeyPatch, launch: Callable[[], object], want: LaunchCost, slack: float = 0.0
) -> None:
    """The launch touches what its cost says, or up to `slack` of it less: rows are counted whole of which some numbers
    are read."""
    with watched(monkeypatch) as traffic:
        launch()
    assert (1 - slack) * want.num_bytes <= traffic.num_bytes <= want.num_bytes


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("half", [8, 4])
def test_the_prologue(half: int, has_norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, kv = torch.ones(3, 8, 16).half(), torch.zeros(2, 4, 2, 8, 16).half()
    tables = torch.ones(5, half), torch.ones(5, half), torch.arange(3)
    norms = HeadNorms(q=torch.ones(16).half(), k=torch.ones(16).half(), eps=1e-5) if has_norms else None
    assert_counts(
        monkeypatch,
        lambda: triton_prologue.attention_prologue(qkv, norms, *tables, *kv, torch.tensor([3, 9, 20])),
        roofline.attention_prologue(3, 4, 2, 16, 2 * half, 2, 2, has_norms),
    )


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(3, 40), torch.ones(40)
    assert_counts(monkeypatch, lambda: triton_layers.rms_norm(x, weight, 1e-5), roofline.rms_norm(3, 40, 4))
    add = roofline.add_rms_norm(3, 40, 4)
    assert_counts(monkeypatch, lambda: triton_layers.add_rms_norm(x, x.clone(), weight, 1e-5), add)
    layer = roofline.layer_norm(3, 40, 4)
    assert_counts(monkeypatch, lambda: triton_layers.layer_norm(x, weight, weight.clone(), 1e-5), layer)
    assert_counts(monkeypatch, lambda: triton_layers.gated(x, "silu"), roofline.gated(3, 20, 4))
    assert_counts(monkeypatch, lambda: triton_layers.activated(x, "gelu"), roofline.activated(3, 40, 4))


def test_copies_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    data, ids = torch.zeros(6, 3000), torch.arange(6)
    assert_counts(
        monkeypatch, lambda: triton_copy.copy_blocks(data, 0, ids[:2], ids[2:4]), roofline.copy_blocks(2, 12_000)
    )


ASKED = table({"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}, {}, {"presence_penalty": 1.0, "num_biased": 3})
SLOTS = torch.arange(4)


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = noise(4, 8193).half()
    want = roofline_sampling.choose(4, 8193, 2)
    assert_counts(monkeypatch, lambda: triton_sampling.choose(logits, ASKED, SLOTS, SLOTS), want, slack=0.01)
    want = roofline_sampling.choose_truncated(4, 8193, 2)
    with watched(monkeypatch) as traffic:
        triton_sampling.choose_truncated(logits, ASKED, SLOTS, SLOTS)
    listed = 2 * 4 * (triton_sampling.NUM_CANDIDATES + 65)  # candidates and groups, written and read again, at most
    assert 0.98 * want.num_bytes <= traffic.num_bytes <= want.num_bytes + listed


def test_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, counts = noise(4, 8193).half(), torch.zeros(4, 8193, dtype=torch.int16)
    biased, bias = torch.tensor([[0, 5, 8192]] * 4, dtype=torch.int32), torch.ones(4, 3)
    masks = torch.zeros(1, 257, dtype=torch.int32)
    lists = (counts, biased, bias, biased, masks, torch.tensor([-1, -1, 0, -1]))
    want = roofline_sampling.edit(4, 8193, 2, 1, 1, [0, 0, 0, 3])
    assert_counts(monkeypatch, lambda: triton_edits.edit(logits, ASKED, SLOTS, SLOTS, *lists), want, slack=0.01)


def test_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, forced = torch.arange(130), torch.full((130,), -1, dtype=torch.int32)
    assert_counts(monkeypatch, lambda: triton_edits.force(chosen, forced), roofline_sampling.force(130))


def test_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = noise(4, 8193).half()
    want = roofline_sampling.score(3, 8193, 2, 5)
    launch = lambda: triton_scores.score(logits, SLOTS[1:], SLOTS, 5)  # noqa: E731
    assert_counts(monkeypatch, launch, want, slack=0.01)


def test_the_state_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in step_trials(triton_step, 5, 37, torch.device("cpu"), block_size=4):
        assert_counts(monkeypatch, trial.launch, trial.cost)
