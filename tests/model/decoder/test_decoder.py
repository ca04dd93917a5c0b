"""The decoder against transformers, in float32: the same greedy tokens and, to 1e-4, the same logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.kernels.layout.work_lists import AttentionShape
from millrace.kernels.reference import kernel_set
from millrace.model.decoder import weights
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.linear import Linear, PackedLinear, WidenedLinear
from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.model.sharding.test_ranks import made
from tests.model.stepping import greedy, load_decoder

NUM_NEW = 12
LENGTHS = (1, 15, 16, 17, 500)

Pair = tuple[PreTrainedModel, Decoder]


def prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def reference(
    model: PreTrainedModel, prompt: list[int], num_new: int = NUM_NEW
) -> tuple[list[int], list[torch.Tensor]]:
    """transformers' greedy tokens and the logits each was chosen from; no stop."""
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=config,
        do_sample=False,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), [logits[0] for logits in out.logits]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, path, has_tokenizer=False)
    return model, load_decoder(path)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[list[int], list[torch.Tensor]]]:
    model, decoder = pair
    return [reference(model, prompt) for prompt in prompts(decoder.spec.vocab_size)]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 100], ids=["whole", "chunked"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_greedy_tokens_and_logits_are_those_of_transformers(
    pair: Pair, expected: list[Any], block_size: int, chunk: int | None
) -> None:
    _, decoder = pair
    sequences = greedy(decoder, prompts(decoder.spec.vocab_size), NUM_NEW, block_size, chunk)
    for sequence, (tokens, logits) in zip(sequences, expected, strict=True):
        assert sequence.generated == tokens
        for ours, theirs in zip(sequence.logits, logits, strict=True):
            assert_close(ours, theirs)


@pytest.mark.slow
def test_a_sequence_alone_gets_the_tokens_it_gets_among_others(pair: Pair, expected: list[Any]) -> None:
    _, decoder = pair
    for prompt, (tokens, _) in zip(prompts(decoder.spec.vocab_size), expected, strict=True):
        assert greedy(decoder, [prompt], NUM_NEW)[0].generated == tokens


def test_a_prompt_one_token_at_a_time_gives_the_same_tokens_as_at_once(pair: Pair, expected: list[Any]) -> None:
    _, decoder = pair
    prompt = prompts(decoder.spec.vocab_size)[3]
    assert greedy(decoder, [prompt], NUM_NEW, chunk=1)[0].generated == expected[3][0]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama with dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama without GQA, untied": ("llama", {"num_key_value_heads": 4}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2 with window from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2 with yarn": (
        "qwen2",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3 untied with biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3 with alternating layers": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_within_a_family_match_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    model = make_checkpoint(family, tmp_path, has_tokenizer=False, **overrides)
    decoder = load_decoder(tmp_path)
    for prompt in prompts(decoder.spec.vocab_size, (5, 90)):
        tokens, logits = reference(model, prompt, 6)
        sequence = greedy(decoder, [prompt], 6, chunk=40)[0]
        assert sequence.generated == tokens
        assert_close(sequence.logits[-1], logits[-1])


def test_attention_is_planned_once_a_step_for_the_windows_of_all_layers(tmp_path: Path) -> None:
    family, overrides = VARIANTS["qwen3 with alternating layers"]
    make_checkpoint(family, tmp_path, has_tokenizer=False, **overrides)
    planned, seen = [], []

    def plan_attention(shape: AttentionShape, lengths: Tensor, query_starts: Tensor | None, num_tokens: int) -> str:
        planned.append((shape.windows, lengths.tolist(), query_starts, num_tokens))
        return f"plan {len(planned)}"

    def watched(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend_and_tell(*arguments: Any, plan: str, **scales: Any) -> Tensor:
            seen.append(plan)
            return attend(*arguments, **scales)

        return attend_and_tell

    kernels = SimpleNamespace(
        **vars(kernel_set)
        | {
            "plan_attention": plan_attention,
            "prologue_decode": watched(kernel_set.prologue_decode),
            "paged_attention": watched(kernel_set.paged_attention),
        }
    )
    greedy(load_decoder(tmp_path, kernels=kernels), [[5, 6, 7]], 2)
    assert [(windows, lengths, num_tokens) for windows, lengths, _, num_tokens in planned] == [
        ((8, None), [3], 3),
        ((8, None), [4], 1),
    ]
    assert [None if starts is None else starts.tolist() for _, _, starts, _ in planned] == [[0, 3], None]
    assert seen == ["plan 1"] * 3 + ["plan 2"] * 3


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_logits_stay_near_float32_ones(dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, has_tokenizer=False)
    wide, half = load_decoder(tmp_path), load_decoder(tmp_path, dtype)
    prompt = prompts(wide.spec.vocab_size)[3]
    ours, exact = greedy(half, [prompt], 1)[0].logits[0], greedy(wide, [prompt], 1)[0].logits[0]
    assert (
        ours - exact
    ).abs().max() / exact.abs().max() < error  # a few roundings of 2**-9 and 2**-12, over three layers


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (Linear, torch.float32),
        (PackedLinear, torch.float32),
        (Linear, torch.bfloat16),
        (PackedLinear, torch.bfloat16),
        (WidenedLinear, torch.bfloat16),
        (WidenedLinear, torch.float16),
    ],
)
def test_every_form_of_a_linear_computes_the_same(
    form: Callable[..., Linear], dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    if (form, dtype) == (PackedLinear, torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN packs no bfloat16 for this processor, and that form is never chosen on it")
    torch.manual_seed(0)
    weight, x, residual = torch.randn(48, 33).to(dtype), torch.randn(num_rows, 33).to(dtype), torch.randn(num_rows, 48)
    bias = torch.randn(48).to(dtype) if has_bias else None
    residual = residual.to(dtype)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    linear = form(weight, bias)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.1}
    torch.testing.assert_close(linear(x).double(), product, **tolerance)
    torch.testing.assert_close(linear.unrounded(x).double(), product, **tolerance)
    torch.testing.assert_close(linear.add_to(residual.clone(), x).double(), residual.double() + product, **tolerance)
    assert linear.dtype == dtype
    if form is WidenedLinear and num_rows > 1:
        assert linear.unrounded(x).dtype == torch.float32 and linear(x.float()).dtype == dtype


@pytest.mark.parametrize("family", ["gemma2", "granite"])  # products are normed, and scaled, before they are added
def test_the_residual_keeps_its_dtype_beside_widened_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 97, "num_attention_heads": 4}
    options |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40}
    root = made(family, tmp_path, options | ({"residual_multiplier": 0.5} if family == "granite" else {}))

    def logits(form: type[Linear], dtype: torch.dtype) -> Tensor:
        monkeypatch.setattr(weights, "linear_form", lambda *_, **__: form)
        decoded = greedy(load_decoder(root, dtype=dtype), [[1, 2, 3, 4, 5], [6, 7, 8]], 1)
        return torch.stack([sequence.logits[0] for sequence in decoded])

    torch.testing.assert_close(
        logits(WidenedLinear, torch.bfloat16), logits(Linear, torch.float32), rtol=2**-4, atol=0.05
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_block_can_be_copied_to_many_at_once(device: str, pair: Pair) -> None:
    _, decoder = pair
    cache = KVCache(decoder.spec, 4, 16, torch.float32, torch.device(device))
    assert cache.data.numel() * 4 == 4 * KVCache.bytes_per_block(decoder.spec, 16, torch.float32)
    if device == "meta":  # the layout of a GPU: one block is one piece
        assert cache.data.shape[0] == 4 and cache.layer(0)[0].stride(0) == cache.data.stride(0)
        return
    for layer in range(decoder.spec.num_layers):
        for half in cache.layer(layer):
            half.copy_(torch.arange(4.0)[:, None, None, None].expand_as(half))
    cache.copy_blocks(np.array([1, 1]), np.array([3, 0]))
    for half in cache.layer(2):
        assert half[:, 0, 0, 0].tolist() == [1.0, 1.0, 2.0, 1.0]
    cache.copy_blocks(np.array([2]), np.array([1]))
    for half in cache.layer(0):
        assert half[:, 0, 0, 0].tolist() == [1.0, 2.0, 2.0, 1.0]
