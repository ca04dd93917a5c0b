"""A decoder over ranks that are threads, against the whole decoder in one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.emulated_shards import emulated
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.lora_linear import LoraTable, with_adapters
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.lora.adapter import Adapter, AdapterSlice
from millrace.model.sharding.adapter_shards import adapter_shard
from millrace.model.sharding.comm import CommLost
from millrace.model.sharding.shard import RankShare, spec_of, why_not_cut
from millrace.model.sharding.thread_comm import ThreadGroup
from tests.model.checkpoints import make_checkpoint
from tests.model.stepping import greedy, load_decoder

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 300, 7, 8], list(range(40, 58))]
SMALL: dict[str, Any] = {"hidden_size": 60, "num_hidden_layers": 2, "vocab_size": 641, "num_attention_heads": 6}
WHOLE_VECTORS = {"intermediate_size": 3 * 64}  # of each rank: torch rounds the rest behind them otherwise
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd heads": ("llama", ODD | WHOLE_VECTORS),
    "few key heads, biases, tied": ("qwen2", {"intermediate_size": 161, "vocab_size": 641}),
    "parallel, layer norms": ("gpt_neox", SMALL | {"intermediate_size": 100}),
    "alibi": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 641}),
    "a norm for each head": ("stablelm", SMALL | ODD | WHOLE_VECTORS | {"qk_layernorm": True}),
    "norms after, capped": ("gemma2", SMALL | {"num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 99}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The products here are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    yield {name: made(family, tmp_path_factory.mktemp(family), options) for name, (family, options) in MODELS.items()}


def made(family: str, path: Path, options: dict[str, Any]) -> Path:
    if family in ("llama", "qwen2"):
        make_checkpoint(family, path, has_tokenizer=False, **options)
        return path
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(path)
    return path


class Ranks:
    """All ranks of a decoder, each with a cache of its own; looks like one decoder."""

    def __init__(self, root: Path, size: int, adapter: Adapter | None = None) -> None:
        whole = self.spec = read_spec(root)
        self.dtype, self.device, self.group = torch.float32, CPU, ThreadGroup(size)
        self.kernels = kernel_set.load("torch")
        self._pool = ThreadPoolExecutor(size)
        self.decoders, self._caches = [], []
        for rank in range(size):
            shard = RankShare(rank, size)
            weights = load_weights(root, whole, CPU, torch.float32, shard=shard)
            table = None if adapter is None else LoraTable(1, CPU)
            if table is not None and adapter is not None:
                table.load(1, adapter_shard(adapter, whole, shard))
                weights = with_adapters(weights, table)
            kernels, comm = kernel_set.load("torch"), self.group.comm(rank)
            self.decoders.append(Decoder(spec_of(whole, shard), weights, kernels, adapters=table, comm=comm))

    def forward(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        if not self._caches:
            sizes = (cache.num_blocks, cache.block_size, self.dtype, CPU)
            self._caches = [KVCache(decoder.spec, *sizes) for decoder in self.decoders]
        return self.all(lambda rank: self._run(rank, inputs))[0]

    def _run(self, rank: int, inputs: StepInputs[Tensor]) -> Tensor:
        decoder = self.decoders[rank]
        if decoder.adapters is not None:
            decoder.adapters.begin_step(np.ones(len(inputs.input_ids), np.int64))
        return decoder.forward(inputs, self._caches[rank])

    def all(self, call: Any) -> list[Any]:
        pending = [self._pool.submit(call, rank) for rank in range(self.group.size)]
        for one in pending:
            if (error := one.exception(timeout=60)) is not None:
                self.group.end()  # or the others wait for ever
                raise error
        return [one.result() for one in pending]


def logits_of(decoder: Any) -> Tensor:
    return torch.stack([row for one in greedy(decoder, PROMPTS, 3, chunk=9) for row in one.logits])


CASES = [
    *(("odd heads", 3), ("few key heads, biases, tied", 2), ("few key heads, biases, tied", 4)),
    *(("parallel, layer norms", 2), ("alibi", 3), ("norms after, capped", 6)),
]


@pytest.mark.parametrize(("model", "size"), CASES)
def test_ranks_give_the_logits_of_the_whole_decoder(roots: dict[str, Path], model: str, size: int) -> None:
    found, expected = logits_of(Ranks(roots[model], size)), logits_of(load_decoder(roots[model]))
    assert found.shape == expected.shape and torch.equal(found.argmax(1), expected.argmax(1))
    assert (found.log_softmax(1) - expected.log_softmax(1)).abs().max() < 1e-5
    assert not torch.equal(found, expected)  # sums of several parts


@pytest.mark.parametrize("name", ["odd heads", "a norm for each head"])
def test_ranks_give_the_bits_of_one_that_sums_in_their_pieces(roots: dict[str, Path], name: str) -> None:
    root, size = roots[name], 3
    spec = read_spec(root)
    shares = [load_weights(root, spec, CPU, torch.float32, shard=RankShare(rank, size)) for rank in range(size)]
    one = Decoder(spec, emulated(spec, shares), kernel_set.load("torch"))
    assert torch.equal(logits_of(Ranks(root, size)), logits_of(one))


def test_one_process_has_the_sinks_of_all_ranks(roots: dict[str, Path]) -> None:
    spec, sinks = read_spec(roots["odd heads"]), torch.arange(9.0)
    shares = []
    for rank in range(3):
        share = load_weights(roots["odd heads"], spec, CPU, torch.float32, shard=RankShare(rank, 3))
        layers = [replace(layer, sinks=sinks[3 * rank :][:3] + place) for place, layer in enumerate(share.layers)]
        shares.append(replace(share, layers=tuple(layers)))
    for place, layer in enumerate(emulated(spec, shares).layers):
        assert layer.sinks is not None and torch.equal(layer.sinks, sinks + place)


def test_an_adapter_over_ranks_gives_the_logits_of_the_whole(roots: dict[str, Path]) -> None:
    root = roots["few key heads, biases, tied"]
    spec, random = read_spec(root), np.random.default_rng(0)
    heads, keys, inner = 4 * 16, 2 * 16, 161

    def one(start: int, rows: int, columns: int) -> AdapterSlice:
        a, b = (random.normal(0, 0.2, shape).astype(np.float32) for shape in ((3, columns), (rows, 3)))
        return AdapterSlice(start, a, b)

    linears: dict[Any, Any] = {
        (0, "qkv"): (one(5, heads - 7, 64), one(heads + keys, keys, 64)),
        (1, "output"): (one(0, 64, heads),),
        (1, "gate_up"): (one(0, inner, 64), one(inner + 3, inner - 9, 64)),
        (2, "down"): (one(0, 64, inner),),
    }
    adapter, table = Adapter("a", None, "float32", linears), LoraTable(1, CPU)
    table.load(1, adapter)
    whole = Decoder(spec, with_adapters(load_decoder(root).weights, table), kernel_set.load("torch"), adapters=table)
    forward = whole.forward

    def adapted(inputs: StepInputs[Tensor], cache: KVCache, out: Tensor | None = None) -> Tensor:
        table.begin_step(np.ones(len(inputs.input_ids), np.int64))
        return forward(inputs, cache)

    whole.forward = adapted  # type: ignore[method-assign]
    expected, base = logits_of(whole), logits_of(load_decoder(root))
    found = logits_of(Ranks(root, 4, adapter))
    assert (found - expected).abs().max() < 1e-4 < 0.1 < (base[0] - expected[0]).abs().max()


def test_ranks_that_part_are_named_with_their_calls() -> None:
    group = ThreadGroup(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(group.comm(0).sum, torch.zeros(3, 5))
        second = pool.submit(group.comm(1).gather, torch.zeros(3, 5))
        errors = [str(one.exception()) for one in (first, second)]
        assert "ranks parted: rank 0: sum [3, 5] float32, rank 1: gather [3, 5] float32" in errors
        assert isinstance(first.exception(), CommLost) and isinstance(second.exception(), CommLost)


def test_heads_that_ranks_cannot_share_are_refused_with_numbers(roots: dict[str, Path]) -> None:
    spec = read_spec(roots["odd heads"])
    assert why_not_cut(spec, 3) is None
    assert why_not_cut(spec, 2) == ("must divide 9 heads, and divide 3 key/value heads or be a multiple; use 1, 3 or 9")


def test_layers_that_read_anothers_cache_are_refused(roots: dict[str, Path]) -> None:
    spec = read_spec(roots["odd heads"])
    shared = replace(spec.layers[0], mixer=replace(spec.attention, kv_of=0))
    problem = why_not_cut(replace(spec, layers=(spec.layers[0], shared)), 3)
    assert problem is not None and "differ in keys and values, which ranks do not share; use 1" in problem
