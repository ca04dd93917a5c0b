"""The Triton kernels of experts against their twins, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_experts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.layout.experts import CodedMatrices, ExpertStack, RoutedExperts, most_tiles
from millrace.kernels.reference import experts as reference
from millrace.kernels.reference.experts import route
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.experts import launches
from millrace.kernels.triton.experts.launches import list_pairs, routed_experts
from millrace.model.decoder.experts import Experts
from millrace.model.decoder.linear import Linear
from millrace.model.decoder.memory_estimate import weights_bytes
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import parse_config
from millrace.model.spec import RouterSpec
from tests.counts import FULL
from tests.model.checkpoints import SHAPE

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
NUM_LISTED = 170 if FULL else 33  # tokens, of which one program does not list all pairs
RULES: dict[str, RouterSpec] = {
    "softmax": RouterSpec(),
    "softmax, normed": RouterSpec(norm_top_k=True),
    "softmax of the chosen": RouterSpec(when="after_top_k", scale=0.5),
    "sigmoid with groups": RouterSpec(
        score="sigmoid", norm_top_k=True, norm_eps=1e-20, scale=2.5, groups=3, groups_kept=2, group_score="top2"
    ),
    "softmax with groups": RouterSpec(groups=3, groups_kept=1, scale=16.0),
    "least sum": RouterSpec(score="sigmoid", norm_top_k=True, norm_min=3.0),
}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def made(num_experts: int, width: int, inner: int, dtype: torch.dtype = torch.float32, **options: Any) -> RoutedExperts:
    """Experts with drawn weights."""
    torch.manual_seed(width)
    halves = 1 + options.get("is_gated", True)
    has_bias = options.pop("has_bias", False)
    gate_up = (torch.randn(num_experts, halves * inner, width) * width**-0.5).to(dtype)
    down = (torch.randn(num_experts, width, inner) * inner**-0.5).to(dtype)
    biases = [torch.randn(each.shape[:2]).to(dtype) if has_bias else None for each in (gate_up, down)]
    each = [
        tuple(
            Linear(weight[expert], None if bias is None else bias[expert])
            for weight, bias in zip((gate_up, down), biases, strict=True)
        )
        for expert in range(num_experts)
    ]
    stack = ExpertStack(gate_up=gate_up, gate_up_bias=biases[0], down=down, down_bias=biases[1])
    return RoutedExperts(**({"rule": RouterSpec(), "top_k": 3, "each": each, "stack": stack} | options))  # type: ignore[arg-type]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---- routing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_tokens_are_routed_as_by_the_twin(name: str, has_bias: bool) -> None:
    rule, num_experts = RULES[name], 21
    torch.manual_seed(7)
    logits, bias = torch.randn(5, num_experts), torch.randn(num_experts) if has_bias else None
    experts = made(num_experts, 8, 8, rule=rule, choice_bias=bias, scales=torch.rand(num_experts))
    found = list_pairs(logits, experts, 16)
    ids, shares = route(logits, rule, 3, bias)
    assert torch.equal(found.ids.long(), ids)
    assert experts.scales is not None
    assert_close(found.shares, shares * experts.scales[ids])


def test_of_equal_experts_and_groups_the_lower_comes_first() -> None:
    logits = torch.tensor([[0.0, -0.0, 2.0, 2.0, -1.0, 2.0], [0.0] * 6, [5.0, 1.0, 1.0, 1.0, 5.0, 1.0]])
    pairs = RouterSpec(groups=2, groups_kept=1, score="sigmoid", group_score="top2")
    for rule in (RouterSpec(), RouterSpec(groups=3, groups_kept=2), pairs):
        experts = made(6, 8, 8, rule=rule)
        assert torch.equal(list_pairs(logits, experts, 16).ids.long(), route(logits, rule, 3)[0])


def test_experts_of_rows_with_nan_exist_and_their_weights_are_nan() -> None:
    logits = torch.randn(3, 5)
    logits[1, 2] = torch.nan
    for rule in RULES.values():
        if rule.groups == 1:
            found = list_pairs(logits, made(5, 8, 8, rule=rule), 16)
            assert found.shares[1].isnan().any() and not found.shares[[0, 2]].isnan().any()
            assert found.ids.min() >= 0 and found.ids.max() < 5


# ---- lists ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 7, 45, *([90, 129, 400] if FULL else [])])
def test_lists_have_every_pair_once_in_tiles_of_one_expert(num_tokens: int) -> None:
    num_experts, top_k, rows = 11, 3, 16
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts) + 3 * torch.randn(num_experts)
    found = list_pairs(logits, made(num_experts, 8, 8), rows)
    flat = found.ids.reshape(-1).long()
    assert torch.equal(found.order.long(), flat.argsort(stable=True))
    tiles = found.tiles[: int(found.num_tiles)].tolist()
    assert len(tiles) <= most_tiles(num_tokens * top_k, num_experts, rows) == len(found.tiles)
    assert [begin for _, begin, _ in tiles] == sorted({begin for _, begin, _ in tiles})
    assert sum(count for _, _, count in tiles) == num_tokens * top_k
    ends = 0
    for expert, begin, count in tiles:
        assert begin == ends and 1 <= count <= rows
        assert (flat[found.order[begin : begin + count].long()] == expert).all()
        ends += count
    counts = torch.bincount(flat, minlength=num_experts)
    assert len(tiles) == int(((counts + rows - 1) // rows).sum())


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE if FULL else [torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_bias": True, "activation": "swiglu_clamped", "alpha": 1.5, "limit": 1.0},
        {"is_gated": False, "activation": "relu2", "has_bias": True},
    ],
    ids=["gated", "with biases", "without a gate"],
)
def test_a_layer_of_experts_is_its_twin(options: dict[str, Any], dtype: torch.dtype) -> None:
    experts = made(7, 40, 21, dtype, **options)
    torch.manual_seed(3)
    x, logits = torch.randn(19, 40).to(dtype), torch.randn(19, 7)
    assert_close(routed_experts(x, logits, experts), reference.routed_experts(x, logits, experts), dtype)
    assert routed_experts(x[:0], logits[:0], experts).shape == (0, 40)


CODED: dict[str, dict[str, Any]] = {
    "e2m1": {"bits": 4, "group": 16, "table": torch.tensor([*range(8), *range(0, -8, -1)]) * 0.5},
    "zeros": {"bits": 4, "group": 8, "has_zeros": True},
    "int8": {"bits": 8, "group": 48, "zero": 128.0, "has_offsets": True},
}


def coded(*shape: int, bits: int, group: int, **options: Any) -> CodedMatrices:
    """Drawn codes of matrices [E, N, K]."""
    is_packed, groups = bits == 4, (*shape[:2], -(-shape[2] // group))
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // (1 + is_packed))).to(torch.uint8)
    zeros = torch.randint(0, 16, groups).to(torch.uint8) if options.get("has_zeros") else None
    offsets = torch.randn(groups) * 0.01 if options.get("has_offsets") else None
    scales, table = torch.rand(groups).half() * (0.05 if is_packed else 0.003), options.get("table")
    others = {"table": table, "zero": options.get("zero", 0.0), "num_columns": shape[2], "is_packed": is_packed}
    return CodedMatrices(codes=codes, scales=scales, zeros=zeros, offsets=offsets, group=group, **others)


@pytest.mark.parametrize("name", CODED)
def test_a_layer_of_experts_in_codes_is_the_twin_of_their_numbers(name: str) -> None:
    torch.manual_seed(7)
    gate_up, down = coded(5, 48, 40, **CODED[name]), coded(5, 40, 24, **CODED[name])
    stack = ExpertStack(gate_up=gate_up, gate_up_bias=torch.randn(5, 48), down=down, down_bias=None)
    each = [
        (Linear(one, bias), Linear(other))
        for one, bias, other in zip(gate_up.numbers(), stack.gate_up_bias, down.numbers(), strict=True)
    ]
    experts = RoutedExperts(rule=RouterSpec(), top_k=3, each=each, stack=stack)
    x, logits = torch.randn(7, 40), torch.randn(7, 5)
    assert_close(routed_experts(x, logits, experts), reference.routed_experts(x, logits, experts))


def test_many_pairs_are_listed_by_several_programs() -> None:
    experts = made(5, 16, 16, top_k=4)
    torch.manual_seed(4)
    x, logits = torch.randn(NUM_LISTED, 16), torch.randn(NUM_LISTED, 5)
    assert_close(routed_experts(x, logits, experts), reference.routed_experts(x, logits, experts))


def rows_of_products_keep_their_bits() -> bool:
    """Whether a row of numpy's products, by which the interpreter multiplies tiles, has its bits in any place."""
    dice = np.random.default_rng(0)
    rows, weight = dice.standard_normal((16, 32), np.float32), dice.standard_normal((32, 32), np.float32)
    return np.array_equal(np.roll(rows, 3, 0) @ weight, np.roll(rows @ weight, 3, 0))


@pytest.mark.skipif(
    not rows_of_products_keep_their_bits(), reason="on this CPU numpy sums a row by its place in the tile"
)
def test_no_bit_of_a_row_depends_on_the_others() -> None:
    experts = replace(made(5, 24, 21), is_batch_invariant=True)
    torch.manual_seed(5)
    x, logits = torch.randn(20, 24), torch.randn(20, 5)
    whole = routed_experts(x, logits, experts)
    for part in (slice(0, 1), slice(2, 19)):
        assert torch.equal(routed_experts(x[part], logits[part], experts), whole[part])


def test_only_experts_with_rows_are_read() -> None:
    experts = made(9, 24, 21)
    torch.manual_seed(6)
    x, logits = torch.randn(2, 24), torch.randn(2, 9)
    want = routed_experts(x, logits, experts)
    ids, _ = route(logits, experts.rule, experts.top_k)
    assert experts.stack is not None
    assert isinstance(experts.stack.gate_up, Tensor) and isinstance(experts.stack.down, Tensor)
    for expert in set(range(9)) - set(ids.reshape(-1).tolist()):
        experts.stack.gate_up[expert] = torch.nan
        experts.stack.down[expert] = torch.nan
    assert torch.equal(routed_experts(x, logits, experts), want)


def test_rows_may_lie_apart() -> None:
    experts = made(5, 24, 21)
    x, logits = torch.randn(3, 24), torch.randn(3, 5)
    wide, wider = torch.full((3, 50), torch.nan), torch.full((3, 9), torch.nan)
    wide[:, 7:31], wider[:, 2:7] = x, logits
    got = routed_experts(wide[:, 7:31], wider[:, 2:7], experts)
    assert torch.equal(got, routed_experts(x, logits, experts))


@torch.inference_mode()
def test_a_decoder_loads_what_the_kernels_take_and_no_byte_twice() -> None:
    spec = parse_config({"model_type": "gpt_oss", **SHAPE, "num_hidden_layers": 1, "num_local_experts": 5}, "")
    load = partial(load_weights, Path(), spec, torch.device("cpu"), torch.float32, "dummy")
    plain, stacked = load(), load(stacks_experts=True)
    assert weights_bytes(stacked) <= weights_bytes(plain)
    x, (moe,) = torch.randn(5, spec.hidden_size), spec.mixtures
    got, want = (
        Experts(moe, weights.layers[0].experts[0], kernel_set.load(name))(x)
        for weights, name in ((stacked, "triton"), (plain, "torch"))
    )
    assert_close(got, want)


def test_launches_depend_on_the_number_of_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured graph needs: no number is read by the host, which meta tensors would not give."""
    sizes = []
    for name in ("route_kernel", "count_kernel", "place_kernel", "product_kernel", "sum_kernel"):
        monkeypatch.setattr(launches, name, _Recorded(name, sizes))
    stack = ExpertStack(gate_up=_meta(8, 64, 48), gate_up_bias=None, down=_meta(8, 48, 32), down_bias=None)
    experts = RoutedExperts(rule=RouterSpec(), top_k=2, stack=stack)
    routed_experts(_meta(300, 48), _meta(300, 8), experts)
    assert sizes == [
        ("route_kernel", (3,)),
        ("count_kernel", (3,)),
        ("place_kernel", (3,)),
        ("product_kernel", (1, 45)),
        ("product_kernel", (2, 45)),
        ("sum_kernel", (300, 1)),
    ]


class _Recorded:
    def __init__(self, name: str, sizes: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.sizes = name, sizes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.sizes.append((self.name, grid))
        return lambda *args, **options: None


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")
