"""Models of transformers on the paged cache give the logits that they give by themselves, however a step is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels.reference import kernel_set
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.fallback.attention_interface import IMPLEMENTATION
from millrace.model.fallback.transformers_decoder import TransformersDecoder, TransformersModel
from tests.model.fallback.tiny_models import KINDS, VOCAB_SIZE, loaded, make_model

BLOCK_SIZE, BLOCKS_EACH = 4, 16
LENGTHS = (57, 33, 9)  # tokens of three sequences: beyond windows and chunks, just beyond, and within


@pytest.mark.parametrize("model_type", KINDS)
def test_parts_beside_neighbours_give_the_logits_of_a_whole_prompt(model_type: str) -> None:
    model = loaded(make_model(model_type))
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [whole(model, prompt) for prompt in prompts]
    found: list[list[Tensor]] = [[], [], []]
    walk = Walk(model, prompts)
    for counts in [
        (20, 7, 0),
        (1, 20, 5),
        (30, 1, 1),
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 0),
        (1, 1, 0),
        (1, 0, 0),
    ]:
        for sequence, logits in walk.step(counts):
            found[sequence].append(logits)
    for parts, logits in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), logits[: sum(map(len, parts))], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_hidden_states_and_the_head_alone_give_the_logits_of_a_step(model_type: str) -> None:
    model = loaded(make_model(model_type))
    prompt = tokens(12, 0)
    walk = Walk(model, [prompt])
    inputs = walk.inputs((12,), [0])
    hidden = walk.decoder.hidden(inputs, walk.cache)
    assert hidden.shape == (12, 32) and walk.decoder.normed(hidden) is hidden
    torch.testing.assert_close(walk.decoder.logits(hidden), whole(model, prompt), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(walk.decoder.forward(inputs, walk.cache), whole(model, prompt), atol=2e-4, rtol=2e-4)


def test_layers_say_what_transformers_says_of_them() -> None:
    layers = {name: loaded(make_model(name)).layers for name in ("phimoe", "llama4_text", "gemma3n_text", "diffllama")}
    assert [layer.window for layer in layers["phimoe"]] == [24, 24]
    assert [(layer.window, layer.chunk) for layer in layers["llama4_text"]] == [(None, 32), (None, None)]
    assert [(layer.place, layer.writes) for layer in layers["gemma3n_text"]] == [
        (0, True),
        (1, True),
        (0, False),
        (1, False),
    ]
    assert [layer.window for layer in layers["gemma3n_text"]] == [24, None, 24, None]
    assert [layer.place for layer in layers["diffllama"]] == [0, 1, 2, 3]  # two calls of each of two modules


def test_the_cache_has_layers_for_what_is_written_in_the_largest_size() -> None:
    latent = loaded(make_model("deepseek_v3"))
    assert (latent.spec.num_layers, latent.spec.num_kv_heads, latent.spec.head_dim) == (2, 4, 16)
    assert latent.used_share == (16 + 12) / 32
    assert loaded(make_model("gemma3n_text")).spec.num_layers == 2


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_memory_of_a_step_is_at_least_what_torch_allocates(model_type: str) -> None:
    model = loaded(make_model(model_type))
    walk = Walk(model, [tokens(60, 0)])
    inputs = walk.inputs((60,), [59])
    most = peak_bytes(lambda: walk.decoder.forward(inputs, walk.cache))
    assert most <= model.step_bytes(60, 60) < 3 * most


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch had allocated at a time within `run`, by its profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# -- steps


def tokens(count: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB_SIZE, count))


@torch.inference_mode()
def whole(model: TransformersModel, prompt: Tensor) -> Tensor:
    """The logits of a prompt [P] by transformers alone, [P, V]."""
    model.model.set_attn_implementation("eager")
    positions = torch.arange(len(prompt))
    logits = model.body.logits_of_step(prompt, positions, positions)
    model.model.set_attn_implementation(IMPLEMENTATION)
    return logits


class Walk:
    """Sequences in steps, in blocks that lie anywhere."""

    def __init__(self, model: TransformersModel, prompts: Sequence[Tensor]) -> None:
        self.prompts = prompts
        self.decoder = TransformersDecoder(model, kernel_set)
        num_blocks = BLOCKS_EACH * len(prompts)
        self.cache = KVCache(model.spec, num_blocks, BLOCK_SIZE, model.dtype, model.device)
        self.tables = np.random.default_rng(9).permutation(num_blocks).astype(np.int32).reshape(-1, BLOCKS_EACH)
        self.num_done = [0] * len(prompts)

    def step(self, counts: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Computes the next tokens of each sequence; returns each one's logits [n, V]."""
        rows = [sequence for sequence, count in enumerate(counts) if count]
        rows.sort(key=lambda sequence: counts[sequence] != 1)  # single tokens first, as a runner has them
        logits = self.decoder.forward(self.inputs(counts, None), self.cache)
        return list(zip(rows, logits.split([counts[sequence] for sequence in rows]), strict=True))

    def inputs(self, counts: Sequence[int], logits_rows: list[int] | None) -> StepInputs[Tensor]:
        rows = sorted((n for n, count in enumerate(counts) if count), key=lambda n: counts[n] != 1)
        places = [torch.arange(self.num_done[n], self.num_done[n] + counts[n]) for n in rows]
        for n in rows:
            self.num_done[n] += counts[n]
        tables = torch.from_numpy(self.tables)[rows]
        slots = [
            table[place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
            for table, place in zip(tables, places, strict=True)
        ]
        sizes = torch.tensor([counts[n] for n in rows])
        wanted = range(int(sizes.sum())) if logits_rows is None or logits_rows == [0] else logits_rows
        return StepInputs(
            input_ids=torch.cat([self.prompts[n][place] for n, place in zip(rows, places, strict=True)]),
            positions=torch.cat(places),
            slot_mapping=torch.cat(slots),
            block_tables=tables,
            query_starts=torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
            lengths=torch.tensor([self.num_done[n] for n in rows], dtype=torch.int32),
            logits_rows=torch.tensor(list(wanted)),
            num_decode=int((sizes == 1).sum()),
        )
