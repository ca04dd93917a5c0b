"""The device thread, which submits steps, makes no tensor operation that would wait for a GPU.

Kernels are exempt, as here they are their PyTorch twins, and on a GPU they are launched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.stages import StructuredOutputs
from millrace.stages.engine.engine import Engine
from millrace.stages.params import SamplingParams
from tests.model.checkpoints import make_checkpoint
from tests.runtime.device_streams.host_streams import HostStreams
from tests.stages.late_engines import greedy, prompts, run

WAITS = ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "is_nonzero")


class Guard:
    """While a thread is `watching`, every operation that waits is recorded and raises, except `exempt` ones."""

    def __init__(self) -> None:
        self.caught: list[str] = []
        self.num_watched = 0
        self._local = threading.local()

    @property
    def is_watching(self) -> bool:
        return bool(getattr(self._local, "depth", 0) == 1)

    def watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.num_watched += 1
            with self._at(1):
                return run(*args, **kwargs)

        return watched

    def exempt(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any, **kwargs: Any) -> Any:
            with self._at(0):
                return run(*args, **kwargs)

        return launched

    @contextmanager
    def _at(self, depth: int) -> Iterator[None]:
        before, self._local.depth = getattr(self._local, "depth", 0), depth
        try:
            yield
        finally:
            self._local.depth = before

    def check(self, name: str) -> None:
        if self.is_watching:
            self.caught.append(name)
            raise AssertionError(f"Tensor.{name} waits for the device")


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    guard = Guard()

    def guarded(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            index = args[0] if name in ("__getitem__", "__setitem__") else None
            parts = index if isinstance(index, tuple) else (index,)
            if index is None or any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts):
                guard.check(name)
            return original(self, *args, **kwargs)

        return method

    for name in (*WAITS, "__getitem__", "__setitem__"):
        monkeypatch.setattr(torch.Tensor, name, guarded(name))
    return guard


def launched(kernels: Any, guard: Guard) -> Any:
    """The same kernels, exempt."""
    return SimpleNamespace(
        **{name: guard.exempt(each) if callable(each) else each for name, each in vars(kernels).items()}
    )


def watch(engine: Engine, guard: Guard) -> None:
    """Makes the guard watch all calls that a started engine submits."""
    model: Any = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
    decoder, work, chooser = model.runner.decoder, model._work, model._chooser
    decoder.kernels, chooser._kernels = (launched(each, guard) for each in (decoder.kernels, chooser._kernels))
    for layer in decoder._blocks:
        layer.kernels = decoder.kernels
    model.runner.cache._copy_blocks = guard.exempt(model.runner.cache._copy_blocks)
    names = ("apply_updates", "make_inputs", "note_tokens")
    work._kernels = SimpleNamespace(**{name: guard.exempt(getattr(work._kernels, name)) for name in names})
    for stage, name in (("execute", "forward"), ("sample", "sample")):
        owner = engine.pipeline.stages[stage]
        owner = owner.runner if stage == "execute" else owner.sampler  # type: ignore[attr-defined]
        setattr(owner, name, guard.watching(getattr(owner, name)))


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_submitting_a_step_never_waits_for_a_number(
    tmp_path: Path, guard: Guard, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path)
    params = [
        greedy(12),
        SamplingParams(max_tokens=12, temperature=1.0, top_p=0.7, top_k=30, seed=1, ignore_eos=True),
        greedy(12, repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=3),
        greedy(12, logprobs=4),
        greedy(12, n=2),
        greedy(12, allowed_token_ids=(8, 9), bad_words_token_ids=((9, 8), (8, 8))),
        SamplingParams(max_tokens=12, temperature=0.0, structured_outputs=StructuredOutputs(regex="[a-z]{200,}")),
    ]
    asks = list(zip(prompts(len(params), 40), params, strict=True))
    settings = {"num_gpu_blocks": 14, "max_model_len": 64, "block_size": 8, "num_cpu_blocks": 20}
    ran = asyncio.run(
        run(tmp_path, asks, HostStreams(), lambda engine: watch(engine, guard), enforce_eager=is_eager, **settings)
    )
    assert guard.caught == [] and guard.num_watched > 30 and ran.num_attended == 0
    assert all(len(ids) == 12 for answer in ran.answers for ids, _, _ in answer)


def test_a_step_that_is_attended_does_wait(tmp_path: Path, guard: Guard) -> None:
    make_checkpoint("qwen3", tmp_path)
    asks = [([5, 6, 7], greedy(4, prompt_logprobs=1))]
    with pytest.raises(Exception, match="fail"):
        asyncio.run(run(tmp_path, asks, HostStreams(), lambda engine: watch(engine, guard)))
    assert guard.caught
