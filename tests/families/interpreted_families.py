"""Decoders of families on the Triton kernels, in Triton's interpreter, against transformers: a row a piece.

Their products are the kernels of few rows: with matrix instructions and splits for the prompt, without for a token.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/families/interpreted_families.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.tilings.products import FormsByRows, ProductForm
from millrace.kernels.tilings.tables import Tilings
from millrace.model.decoder import weights
from millrace.model.decoder.linear import Linear
from tests.counts import FULL
from tests.families.oracle import prompts
from tests.families.zoo import Entry, chosen
from tests.model.stepping import greedy, load_decoder

LENGTHS, NUM_NEW = (9,), 2
PIECES = {
    "gemma2": "soft caps, norms with f32 weights and gated GELU",
    "gpt-neox": "parallel layers, biases, and no gate",
    "cohere-qk-norm": "LayerNorms, and norms of heads with a weight each",
    "olmo2": "norms over rows",
    "hunyuan": "norms after the rotation",
    "apertus": "xIELU",
    "ministral3": "factors of queries",
    "smollm3-interval": "layers without rotation",
}


EXPERTS = {
    "mixtral": "weights by softmax, then normed",
    "qwen2-moe": "shared experts behind a gate, and layers without experts",
    "granitemoe-shared": "a softmax of the chosen",
    "gpt-oss-clamped": "biases, and a clamped gate",
    "glm4-moe": "the best groups by sigmoid",
    "ernie4-5-moe": "a bias for the choice",
}

OTHERS = {  # CI has the first two
    "nemotron-h": "Mamba-2, and layers of one part each",
    "minicpm3": "latents",
    "qwen3.5": "gated delta rule, and a gate of attention's output",
    "gemma4-text": "heads of two sizes, caches that layers share, and inputs of layers",
    "gemma4-experts": "keys that are values, and experts beside a feed",
    "deepseek-v3": "latents, and experts",
    "glm4-moe-lite": "latents of queries",
    "granite-hybrid-dense": "Mamba-2 beside attention without rotation",
    "lfm2": "short convolutions",
    "bamba": "Mamba-2 beside rotary attention",
    "qwen3-next": "the delta rule beside experts",
}

FORMS: FormsByRows = (
    (1, ProductForm(form="vector", block_n=16, block_k=256, num_warps=1, fuses_norm=True)),
    (9, ProductForm(form="split", block_m=16, block_n=64, block_k=32, num_splits=2, num_stages=2)),
)


class EveryProduct(Tilings):
    """The same forms for all products, float32 and small ones too."""

    def product_forms(self, *shape: object) -> tuple[FormsByRows, str]:  # type: ignore[override]
        return FORMS, "measured"


@pytest.mark.parametrize("name", PIECES)
def test_a_family_has_the_logits_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "linear_form", lambda *args, **options: Linear)  # on a CPU it would be packed
    row = next(row for row in chosen([name]) if row.name == name)
    entry = Entry(row, tmp_path / name, NUM_NEW, LENGTHS)
    decoder = load_decoder(entry.folder, kernels=kernel_set.load("triton"), tilings=EveryProduct("a test", "here"))
    assert all(each is not None for each in (decoder.few_rows.layers[-1].qkv, decoder.few_rows.layers[-1].down))
    sequences = greedy(decoder, prompts(LENGTHS), NUM_NEW, block_size=4)
    for sequence, answer in zip(sequences, entry.answers, strict=True):
        assert sequence.generated == answer.token_ids
        torch.testing.assert_close(torch.stack(sequence.logits), answer.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("name", EXPERTS)
def test_a_family_with_experts_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    row = next(row for row in chosen([name]) if row.name == name)
    entry = Entry(row, tmp_path / name, NUM_NEW, LENGTHS)
    sequences = greedy(load_decoder(entry.folder, kernels=kernel_set.load("triton")), prompts(LENGTHS), NUM_NEW, 4)
    for sequence, answer in zip(sequences, entry.answers, strict=True):
        assert sequence.generated == answer.token_ids
        torch.testing.assert_close(torch.stack(sequence.logits), answer.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*OTHERS][: None if FULL else 2])
def test_a_family_of_other_kinds_in_chunks_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    row = next(row for row in chosen([name]) if row.name == name)
    entry = Entry(row, tmp_path / name, NUM_NEW, LENGTHS)
    sequences = greedy(load_decoder(entry.folder, kernels=kernel_set.load("triton")), prompts(LENGTHS), NUM_NEW, 4, 5)
    for sequence, answer in zip(sequences, entry.answers, strict=True):
        assert sequence.generated == answer.token_ids
        torch.testing.assert_close(torch.stack(sequence.logits), answer.logits, rtol=1e-4, atol=1e-4)
