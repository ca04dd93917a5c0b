"""Whole engines with Triton's kernels, in its interpreter, on a late device.

Run by `tests/kernels/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest` of this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.kernels import triton_launch
from millrace.runtime.hoststreams import HostStreams
from millrace.stages.params import SamplingParams
from tests.model.checkpoints import make_checkpoint
from tests.stages.late_engines import both, greedy, prompts

SETTINGS: dict[str, Any] = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks": 20}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


def drawn(seed: int, num_tokens: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True, **more)


def test_what_is_chosen_on_the_device_is_what_is_chosen_for_a_host_that_waits(checkpoint: Path) -> None:
    params = [
        drawn(1),
        drawn(2, top_k=20, top_p=0.8, min_p=0.05),
        drawn(3, repetition_penalty=1.5, logit_bias={7: 3.0}, min_tokens=3),
        greedy(5, logprobs=3),
    ]
    asks = list(zip(prompts(4, 20), params, strict=True))
    right, ran = both(checkpoint, asks, HostStreams(), enforce_eager=True, **SETTINGS)
    assert ran.answers == right.answers and ran.num_attended == 0
    ours, theirs = (each.outputs[3].outputs[0].logprobs for each in (ran, right))
    assert ours == theirs and ours is not None and len(ours) == 5
