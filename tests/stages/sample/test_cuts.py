"""Each cut in the samplers of numpy, torch and the native library, from a request to its tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels.layout.sampling_fields import CUTS
from millrace.kernels.native import build, machine
from millrace.stages.backends.native.runner import NativeTokenChooser
from millrace.stages.sample.sampler import Sampler
from tests.kernels.draw_rows import kept_weights
from tests.kernels.native_oracle import Checkpoint
from tests.stages.grants import decode, started

NUM_SLOTS, VOCAB = 96, 40
ASKED: dict[str, Any] = {"top_k": 4, "top_p": 0.5, "min_p": 0.2, "top_n_sigma": 1.1, "typical_p": 0.4}


def drawn(kind: str, **params: Any) -> set[int]:
    """The tokens that 96 seeds draw from the same logits."""
    more: dict[str, Any] = {}
    last: Any = np.zeros(NUM_SLOTS, np.int64)
    if kind == "native":
        if not machine.instruction_sets() or build.find_compiler() is None:
            pytest.skip("no AVX2, or no C++ compiler")
        more = {"chooser": partial(NativeTokenChooser, model=Checkpoint.random().load(num_threads=1))}
    elif kind == "torch":
        last = torch.from_numpy(last)
    sampler = Sampler(last, VOCAB, 64, **more)
    logits: Any = np.tile(row(), (NUM_SLOTS, 1))
    news = [started(slot, seed=slot, temperature=1.4, **params) for slot in range(NUM_SLOTS)]
    step = decode(*range(NUM_SLOTS), started=news)
    return set(sampler.sample(step, torch.from_numpy(logits) if kind == "torch" else logits).token_ids.tolist())


def row() -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(5).standard_normal(VOCAB) * 1.2).astype(np.float32)


@pytest.mark.parametrize("kind", ["numpy", "torch", "native"])
@pytest.mark.parametrize("cut", [cut.name for cut in CUTS])
def test_a_cut_of_a_request_leaves_the_tokens_of_its_definition(cut: str, kind: str) -> None:
    kept = set(kept_weights(row(), temperature=1.4, **{cut: ASKED[cut]}).nonzero()[0].tolist())
    found = drawn(kind, **{cut: ASKED[cut]})
    assert 1 < len(kept) < VOCAB / 2 and found <= kept and len(found) > len(kept) / 2
    assert not drawn(kind) <= kept, "the cut had no effect"
