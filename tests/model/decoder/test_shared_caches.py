"""Layers that read another layer's cache: they write nothing, and hold no memory."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from tests.model.stepping import greedy

BLOCK_SIZE, POISON = 4, 1e30
CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "per_layer_config": {},
    "sliding_window": 9,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 4,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size_per_layer_input": 97}))
    spec = read_spec(Path(folder))
    weights = load_weights(folder, spec, torch.device("cpu"), torch.float32, "dummy")
    return Decoder(spec, weights, kernel_set.load("torch"))


def without_readers(decoder: Decoder) -> Decoder:
    """The layers up to the last that has a cache."""
    part = copy(decoder)
    part._blocks = decoder._blocks[: 1 + max(decoder.spec.kv_layers)]
    return part


def step(decoder: Decoder, cache: KVCache, first: int, last: int, *, is_written: bool = True) -> torch.Tensor:
    """Tokens [first, last) of a prompt, on blocks 5, 3, 1."""
    places = torch.arange(first, last)
    blocks = torch.tensor([5, 3, 1])
    return decoder.forward(
        StepInputs(
            input_ids=7 * places % 97,
            positions=places,
            slot_mapping=blocks[places // 4] * 4 + places % 4 if is_written else torch.full_like(places, -1),
            block_tables=blocks[None].int(),
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            lengths=torch.tensor([last], dtype=torch.int32),
            logits_rows=places[-1:] - first,
            num_decode=int(last - first == 1),
        ),
        cache,
    )


def poisoned(decoder: Decoder) -> KVCache:
    cache = KVCache(decoder.spec, 7, BLOCK_SIZE, torch.float32, decoder.device)
    cache.data.fill_(POISON)
    return cache


def test_the_cache_holds_what_its_own_layers_write_and_nothing_else(decoder: Decoder) -> None:
    part = without_readers(decoder)
    cache, expected = poisoned(decoder), poisoned(part)
    assert cache.data.shape == expected.data.shape == (2, 2, 2, 7, BLOCK_SIZE, 8)
    for first, last in ((0, 5), (5, 10), (10, 11)):  # a prompt in two parts, and a token
        step(decoder, cache, first, last)
        step(part, expected, first, last)
        assert torch.equal(cache.data, expected.data)
        assert (cache.data == POISON).sum() == 2 * 2 * 2 * 8 * (7 * BLOCK_SIZE - last)


def test_a_reader_sees_the_cache_of_its_donor(decoder: Decoder) -> None:
    cache = poisoned(decoder)
    logits = step(decoder, cache, 0, 9)
    again = step(decoder, cache, 8, 9, is_written=False)
    torch.testing.assert_close(again, logits)
    cache.layer(1)[1].neg_()  # the values of the layer that the last one reads
    assert not torch.allclose(step(decoder, cache, 8, 9, is_written=False), again)
    assert all(cache.layer(reader)[0].data_ptr() == cache.layer(of)[0].data_ptr() for reader, of in ((2, 0), (4, 1)))


def test_only_layers_with_a_cache_count_in_its_bytes(decoder: Decoder) -> None:
    spec = decoder.spec
    assert spec.donors == {2: 0, 3: 0, 4: 1} and spec.kv_layers == (0, 1)
    assert KVCache.bytes_per_block(spec, BLOCK_SIZE, torch.float32) == 2 * 2 * 2 * 8 * BLOCK_SIZE * 4


@pytest.mark.parametrize("chunk", [3, 7])
def test_prompts_in_parts_give_the_tokens_of_whole_ones(decoder: Decoder, chunk: int) -> None:
    prompts = [[(7 * i + 3) % 97 for i in range(count)] for count in (1, 9, 23)]
    whole = greedy(decoder, prompts, 6, BLOCK_SIZE)
    assert [one.tokens for one in greedy(decoder, prompts, 6, BLOCK_SIZE, chunk)] == [one.tokens for one in whole]
