"""Which products of a decoder are those of kernels of few rows, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.tilings.products import FormsByRows, ProductForm
from millrace.kernels.tilings.tables import Tilings
from millrace.model.decoder import weights
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.linear import Linear
from millrace.model.families.registry import read_spec
from tests.bench.gpu.place import TINY

WIDE = TINY | {"hidden_size": 256, "intermediate_size": 260, "num_hidden_layers": 2, "head_dim": 64}
PREDICTED = "predicted: vector to 1, vector to 4, split to 16, split to 32, split to 64"
CPU = torch.device("cpu")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(dtype: torch.dtype = torch.bfloat16, form: Any = Linear, **options: Any) -> Decoder:
        monkeypatch.setattr(weights, "linear_form", lambda *args, **kwargs: form)
        (tmp_path / "config.json").write_text(json.dumps(WIDE))
        spec = read_spec(tmp_path)
        loaded = weights.load_weights(tmp_path, spec, CPU, dtype, load_format="dummy")
        return Decoder(spec, loaded, kernel_set.load("torch"), 64, **options)

    return make


def test_each_product_has_its_forms_or_a_reason(made: Any) -> None:
    decoder = made(tilings=Tilings("a card", "none"))
    assert decoder.few_rows.decisions == {
        "qkv plain 512x256": PREDICTED,
        "output add 256x256": PREDICTED,
        "gate_up gated 520x256": PREDICTED,
        "down add 256x260": "library: num_inner = 260 is no multiple of 16, so rows of the weight are not aligned",
    }
    first, second = decoder.few_rows.layers
    assert first.down is None and torch.equal(first.qkv.weight, decoder.weights.layers[0].qkv.weight)
    assert first.qkv.form(3).block_m == 4 and first.qkv.form(65) is None
    assert second.qkv.weight.data_ptr() != first.qkv.weight.data_ptr()


def test_steps_of_the_most_rows_of_each_form_launch_every_form(made: Any) -> None:
    assert made(tilings=Tilings("a card", "none")).few_rows.form_rows == [1, 4, 16, 32, 64]
    assert made(tilings=Split("a card", "none")).few_rows.form_rows == [4, 16]
    assert made(tilings=None).few_rows.form_rows == []


def test_a_deterministic_decoder_leaves_all_products_as_they_are(made: Any) -> None:
    decoder = made(tilings=Tilings("a card", "none"), is_batch_invariant=True)
    assert not decoder.few_rows.decisions and decoder.few_rows.layers[0].qkv is None


def test_linears_with_a_form_of_their_own_keep_it(made: Any) -> None:
    class Own(Linear): ...

    decisions = made(form=Own, tilings=Tilings("a card", "none")).few_rows.decisions
    assert decisions["qkv plain"] == "library: Own has its own form"


class Split(Tilings):
    """Splits from 5 rows on."""

    def product_forms(self, *shape: object) -> tuple[FormsByRows, str]:  # type: ignore[override]
        split = ProductForm(form="split", block_m=16, block_n=64, block_k=64, num_splits=2)
        return ((4, ProductForm(form="vector", block_m=4)), (16, split)), "measured"


def test_counters_are_zero_at_the_begin_of_a_step_that_uses_them(made: Any) -> None:
    few = made(tilings=Split("a card", "none")).few_rows
    of_products = [each.counters for layer in few.layers for each in (layer.qkv, layer.gate_up, layer.down)]
    for index, counters in enumerate(of_products):
        counters += index + 1  # so that it would show if two shared some
    assert [set(counters.tolist()) for counters in of_products] == [{index + 1} for index in range(6)]
    few.begin_step(4)  # vectors have none
    assert all(counters.all() for counters in of_products)
    few.begin_step(5)
    assert not any(counters.any() for counters in of_products)
