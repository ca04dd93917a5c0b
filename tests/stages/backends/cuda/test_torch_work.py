"""A real decoder on an asynchronous device: the same tokens as the runner that waits for each step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.kv_kinds import kv_layout
from millrace.model.spec import AttentionSpec, DecoderSpec
from millrace.runtime.device_streams.simulated import SimStreams
from millrace.stages.backends.cuda.cuda_graphs import CudaGraphs
from millrace.stages.backends.cuda.device_work import TorchDeviceWork, greedy, step_memory
from millrace.stages.backends.cuda.step_submission import StepSubmitter, SubmittedStep
from millrace.stages.backends.cuda.step_update import EndRules
from millrace.stages.execute.model_runner import ModelRunner
from millrace.stages.messages import StepGrant, StepTokens
from millrace.stages.testing.scripted.outcomes import Outcomes
from tests.model.checkpoints import make_checkpoint
from tests.stages.step_walk import EOS, Walk

CPU = torch.device("cpu")
NUM_BLOCKS = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", folder, has_tokenizer=False)
    return folder


class Subject:
    """One model twice: in a runner, and in a `StepSubmitter`."""

    def __init__(self, folder: Path, walk: Walk, seed: int, num_steps: int, *, is_eager: bool) -> None:
        shape = read_spec(folder)
        if walk.num_kinds > 1:
            shape = windowed(shape)
        weights = load_weights(folder, shape, CPU, torch.float32)
        decoder = Decoder(shape, weights, kernel_set.load("torch"), max_positions=walk.max_model_len)
        caches = [KVCache(shape, NUM_BLOCKS, walk.block_size, torch.float32, CPU) for _ in range(2)]
        if walk.num_kinds > 1:
            caches[1] = cache_of_kinds(shape, walk.block_size)
        self.last_tokens = torch.zeros(walk.num_slots, dtype=torch.int64)
        width = -(-walk.max_model_len // walk.block_size)
        self.runner = ModelRunner(decoder, caches[0], self.last_tokens, width)
        most = walk.num_slots * walk.max_model_len
        graphs, ends = CudaGraphs(walk.num_slots, most, is_eager=is_eager), EndRules((EOS,), walk.max_model_len)
        memory = step_memory(CPU, walk.num_slots, num_steps)
        sizes = {"num_slots": walk.num_slots, "max_model_len": walk.max_model_len, "max_step_tokens": max(most, 64)}
        work = TorchDeviceWork(decoder, caches[1], memory, greedy, **sizes)
        self.line = StepSubmitter(SimStreams(Random(seed)), memory, work, graphs, ends, Outcomes(walk.num_slots, ends))
        if not is_eager:
            self.line.capture(lambda: 0.0)

    def right(self, grant: StepGrant) -> list[int]:
        """The likeliest tokens by the runner's logits."""
        logits: Any = self.runner.forward(replace(grant, more_tables=()))  # on one kind of blocks
        ids: list[int] = logits.argmax(1).tolist() if grant.num_sampled else []
        self.last_tokens[torch.from_numpy(grant.slots[grant.is_sampled])] = torch.tensor(ids, dtype=torch.int64)
        return ids


def windowed(shape: DecoderSpec) -> DecoderSpec:
    """With a window in every second layer."""
    first = shape.layers[0]
    assert isinstance(first.mixer, AttentionSpec)
    seen = replace(first, mixer=replace(first.mixer, window=7))
    return replace(shape, layers=tuple(layer if i % 2 else seen for i, layer in enumerate(shape.layers)))


def cache_of_kinds(shape: DecoderSpec, block_size: int) -> KVCache:
    """Of two kinds; block 1000 + b of the second never has the memory of block b of the first, as a walk needs it."""
    of_layer = KVCache.bytes_per_block(shape, block_size, torch.float32) // shape.num_layers
    layout = kv_layout(shape, block_size, 4000 * shape.num_layers * of_layer, lambda _: of_layer)
    first, second = layout.blocks_per_slab
    assert NUM_BLOCKS / first < 1000 // second and layout.num_blocks[1] > 1000 + NUM_BLOCKS
    return KVCache(shape, layout.num_blocks[0], block_size, torch.float32, CPU, layout=layout)


@pytest.mark.parametrize(
    ("num_steps", "is_eager", "num_kinds"), [(1, True, 1), (2, False, 1), (4, False, 1), (1, True, 2), (3, False, 2)]
)
def test_a_decoder_says_the_same_on_a_late_device(
    checkpoint: Path, num_steps: int, is_eager: bool, num_kinds: int
) -> None:
    walk = Walk(Random(num_steps), has_stops=False, num_kinds=num_kinds)
    subject = Subject(checkpoint, walk, num_steps, num_steps, is_eager=is_eager)
    line, under_way = subject.line, deque[tuple[SubmittedStep, list[int]]]()
    num_tokens = 0

    def tell() -> int:
        step, right = under_way.popleft()
        tokens: StepTokens = step.wait()
        assert tokens.token_ids.tolist() == right
        return len(right)

    for grant in walk.steps(40):
        right = subject.right(grant)
        under_way.append((line.sample(grant, line.forward(grant)), right))
        walk.chose(grant, right)
        if len(under_way) == num_steps:
            num_tokens += tell()
    while under_way:
        num_tokens += tell()
    assert num_tokens > 60 and walk.num_blocks < NUM_BLOCKS
    assert (line.graphs.num_replayed == 0) == is_eager
