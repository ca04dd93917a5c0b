"""Layers dealt over ranks: even shares, and decoders that give the whole one's bits one after another."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.sharding import layer_split
from millrace.model.sharding.comm import MOST_SENT, CommLost
from millrace.model.sharding.layer_split import LayerRange, in_words, spec_of_layers, split_layers, why_not_split
from millrace.model.sharding.process_comm import ProcessComm
from millrace.model.sharding.rank_grid import RankGrid
from millrace.model.sharding.shard import RankShare
from millrace.model.sharding.thread_comm import ThreadGroup
from millrace.model.spec import DecoderSpec
from tests.deploy.cli.machines.strangers import listening_sockets
from tests.model.sharding.test_ranks import CPU, logits_of, made
from tests.model.stepping import load_decoder

SIX: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 32, "vocab_size": 641, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen2", {"intermediate_size": 40, "vocab_size": 641, "num_hidden_layers": 5}),
    "learned positions": ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 641}),
    "latents and experts": (
        "deepseek_v2",
        SIX
        | {"num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 40, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1},
    ),
    "norms after, capped": ("gemma2", SIX | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40}),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    yield {name: made(family, tmp_path_factory.mktemp(family), options) for name, (family, options) in MODELS.items()}


class Chain:
    """All ranges of a decoder in one thread, each with a cache of its own; looks like one decoder."""

    def __init__(self, root: Path, size: int, dtype: torch.dtype) -> None:
        whole = self.spec = read_spec(root)
        self.dtype, self.device, self.kernels = dtype, CPU, kernel_set.load("torch")
        self.parts = [
            Decoder(spec_of_layers(whole, layers), load_weights(root, whole, CPU, dtype, layers=layers), self.kernels)
            for layers in split_layers(whole, size)
        ]
        self._caches: list[KVCache] = []

    def forward(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        if not self._caches:
            self._caches = [
                KVCache(part.spec, cache.num_blocks, cache.block_size, self.dtype, CPU) for part in self.parts
            ]
        hidden = None
        for part, own in zip(self.parts, self._caches, strict=True):
            hidden = part.hidden(inputs, own, hidden)
        assert hidden is not None
        return self.parts[-1].logits(hidden.index_select(0, inputs.logits_rows))


@pytest.mark.parametrize(
    ("model", "size", "dtype"),
    [
        ("tied", 2, "float32"),
        ("tied", 5, "bfloat16"),
        ("learned positions", 3, "float32"),
        ("norms after, capped", 2, "bfloat16"),
        ("latents and experts", 3, "float32"),
    ],
)
def test_ranges_one_after_another_give_the_bits_of_the_whole(
    roots: dict[str, Path], model: str, size: int, dtype: str
) -> None:
    chain = Chain(roots[model], size, getattr(torch, dtype))
    whole = load_decoder(roots[model], dtype=getattr(torch, dtype))
    assert torch.equal(logits_of(chain), logits_of(whole))
    held = [
        (len(part.weights.embedding) > 0, any(tensor.numel() for tensor in part.weights.head.tensors()))
        for part in chain.parts
    ]
    assert held == [(True, False), *[(False, False)] * (size - 2), (chain.spec.head.is_tied, True)]


def shapes_of(spec: DecoderSpec, sizes: list[int]) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{index}.mlp.weight": (size,) for index, size in enumerate(sizes)}


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_share_is_the_least_of_all_splits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(seed)
    sizes = [dice.randint(1, 30) for _ in range(dice.randint(4, 9))]
    readers = {index: dice.randrange(index) for index in range(1, len(sizes)) if dice.random() < 0.15}
    keeping = [n for n in range(len(sizes)) if n in {*readers, *readers.values()} or dice.random() < 0.8] or [0]
    spec: Any = SimpleNamespace(
        num_layers=len(sizes), donors=readers, vocab_size=dice.randint(1, 20), hidden_size=1, kv_layers=keeping
    )
    monkeypatch.setattr(layer_split, "expected_shapes", lambda spec: shapes_of(spec, sizes))
    allowed = [cut for cut in range(1, len(sizes)) if all(not donor < cut <= one for one, donor in readers.items())]

    def largest(edges: list[int]) -> int:
        bounds = list(zip(edges, edges[1:], strict=False))
        shares = [sum(sizes[begin:end]) for begin, end in bounds]
        shares[0], shares[-1] = shares[0] + spec.vocab_size, shares[-1] + spec.vocab_size
        return max(shares)

    def is_possible(edges: list[int]) -> bool:
        return all(any(begin <= one < end for one in keeping) for begin, end in pairwise(edges))

    for size in range(2, min(4, layer_split._most_ranges(spec)) + 1):
        found = split_layers(spec, size)
        edges = [found[0].begin, *(one.end for one in found)]
        every = ([0, *cuts, len(sizes)] for cuts in combinations(allowed, size - 1))
        ways = list(filter(is_possible, every))
        assert edges in ways and largest(edges) == min(map(largest, ways))


def test_a_split_is_told_in_words_and_one_that_cannot_be_says_what_can(roots: dict[str, Path]) -> None:
    spec = read_spec(roots["tied"])
    assert why_not_split(spec, 5) is None
    assert why_not_split(spec, 6) == "qwen2 has 5 layers, for 5 ranks at most; use 5 or less"
    assert in_words([LayerRange(0, 2, 5), LayerRange(2, 4, 5), LayerRange(4, 5, 5)]) == [
        "embedding, 0-1",
        "2-3",
        "4-4, head",
    ]
    shared = SimpleNamespace(
        kv_layers=range(5), has_one_shape=True, embedding=spec.embedding, donors={3: 1, 4: 1}, family="some",
        num_layers=5,
    )  # fmt: skip
    assert why_not_split(shared, 4) == (  # type: ignore[arg-type]
        "some has 5 layers, for 2 ranks at most, as layers that share keys and values stay together; use 2 or less"
    )


def test_each_range_has_a_layer_with_attention() -> None:
    hybrid = SimpleNamespace(kv_layers=(2, 5), has_one_shape=True, donors={}, family="some", num_layers=8)
    hybrid.embedding = SimpleNamespace(per_layer=None)
    assert why_not_split(hybrid, 2) is None  # type: ignore[arg-type]
    assert why_not_split(hybrid, 3) == (  # type: ignore[arg-type]
        "some has 8 layers, for 2 ranks at most, as each needs one with attention; use 2 or less"
    )


def test_threads_send_tensors_in_order_and_as_many_as_may_wait() -> None:
    group = ThreadGroup(2)
    first, second = group.comm(0), group.comm(1)
    for number in range(MOST_SENT):
        first.send(torch.tensor([number]), 1)
    assert [int(second.receive(torch.zeros(1), 0)) for _ in range(MOST_SENT)] == list(range(MOST_SENT))
    group.end()
    with pytest.raises(CommLost, match="a rank has ended"):
        second.receive(torch.zeros(1), 0)


def test_processes_receive_later_what_was_sent_at_once(tmp_path: Path) -> None:
    """Both ends are in this process, in which gloo connects them as it does two."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: ProcessComm(tmp_path, rank, 2, CPU), range(2))
        sent = [torch.randn(size, 3) for size in (1, 7, 400)]
        for one in sent:
            first.send(one.clone(), 1)
        assert all(torch.equal(second.receive(torch.empty_like(one), 0), one) for one in sent)
        second.send(sent[0], 0)
        assert torch.equal(first.receive(torch.empty_like(sent[0]), 1), sent[0])


@pytest.mark.security
def test_ranks_that_have_met_take_no_other_connection(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = listening_sockets(os.getpid()).tcp
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: ProcessComm(tmp_path, rank, 2, CPU), range(2))
        addresses = listening_sockets(os.getpid()).tcp - before
        assert len(addresses) == 2 and {host for host, _ in addresses} == {"127.0.0.1"}
        for address in addresses:
            with pytest.raises(TimeoutError), socket.create_connection(address, 0.1):
                pass
        first.send(torch.ones(2), 1)
        assert second.receive(torch.zeros(2), 0).sum() == 2.0


def test_hidden_states_go_through_all_ranges_to_the_rank_that_schedules() -> None:
    for num_ranges, num_shares in ((1, 3), (3, 1), (3, 2), (2, 4)):
        grid = RankGrid(num_ranges, num_shares)
        assert (grid.range_of(0), grid.share_of(0)) == (num_ranges - 1, RankShare(0, num_shares))
        for share in range(num_shares):
            (rank,) = [one for one in range(grid.size) if (grid.range_of(one), grid.share_of(one).rank) == (0, share)]
            for place in range(num_ranges):
                assert (grid.range_of(rank), grid.share_of(rank).rank) == (place, share)
                assert [grid.range_of(one) for one in grid.mates(rank)] == [place] * num_shares
                assert grid.before(grid.behind(rank)) == rank and rank in grid.mates(rank)
                rank = grid.behind(rank)
