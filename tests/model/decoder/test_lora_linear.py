"""Linears with adapters against sums in float64, of rows of several adapters and the base in one product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.model.decoder.linear import EvenLinear, Linear, PackedLinear, WidenedLinear, linear_form
from millrace.model.decoder.lora_linear import LoraLinear, LoraTable
from millrace.model.lora.adapter import Adapter, AdapterSlice

NUM_IN, NUM_OUT, NUM_TOKENS = 7, 11, 5
SLOTS = np.array([2, 0, 1, 2, 0])


def adapter(seed: int, *slices: tuple[int, int, int]) -> Adapter:
    """One of layer 0's qkv with slices (row_start, num_rows, rank)."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    parts = tuple(AdapterSlice(start, normal(rank, NUM_IN), normal(rows, rank)) for start, rows, rank in slices)
    return Adapter(f"a{seed}", None, "float32", {(0, "qkv"): parts})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_gets_the_update_of_its_own_adapter_and_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(NUM_OUT, NUM_IN).to(dtype), torch.randn(NUM_OUT).to(dtype)
    x, residual = torch.randn(NUM_TOKENS, NUM_IN).to(dtype), torch.randn(NUM_TOKENS, NUM_OUT).to(dtype)
    adapters = {1: adapter(1, (0, 4, 3), (9, 2, 1)), 2: adapter(2, (3, 8, 2))}
    table = LoraTable(2, x.device)
    for slot, one in adapters.items():
        table.load(slot, one)
    linear = LoraLinear(Linear(weight, bias), table, (0, "qkv"))
    wanted = x.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    for token, slot in enumerate(SLOTS):
        for part in adapters[slot].linears[0, "qkv"] if slot else ():
            update = part.b.astype(float) @ (part.a.astype(float) @ x[token].double().numpy())
            wanted[token, part.row_start : part.row_start + part.num_rows] += update
    table.begin_step(SLOTS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-5}
    np.testing.assert_allclose(linear(x).double().numpy(), wanted, **tolerance)
    added = linear.add_to(residual.clone(), x)
    np.testing.assert_allclose(added.double().numpy(), residual.double().numpy() + wanted, **tolerance)


def test_steps_without_adapters_and_linears_without_slices_are_the_base_bit_for_bit() -> None:
    base, x = Linear(torch.randn(NUM_OUT, NUM_IN)), torch.randn(NUM_TOKENS, NUM_IN)
    table = LoraTable(1, x.device)
    table.load(1, adapter(3, (0, 4, 3)))
    linear, other = (LoraLinear(base, table, (layer, "qkv")) for layer in (0, 1))
    table.begin_step(None)
    assert torch.equal(linear(x), base(x)) and torch.equal(linear.unrounded(x), base.unrounded(x))
    table.begin_step(np.array([1, 1, 0, 1, 1]))
    assert torch.equal(other(x), base(x)) and torch.equal(linear(x)[2], base(x)[2])
    assert not torch.equal(linear(x)[0], base(x)[0])


FORMS = [Linear, EvenLinear, WidenedLinear]
if linear_form(torch.device("cpu"), torch.float32, 1) is PackedLinear:
    FORMS.append(PackedLinear)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_updates_has_the_dtype_that_it_has_without(
    form: type[Linear], num_tokens: int, dtype: torch.dtype
) -> None:
    if (form, dtype) == (PackedLinear, torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bfloat16 on this CPU")
    x, table = torch.randn(num_tokens, NUM_IN).to(dtype), LoraTable(1, torch.device("cpu"))
    table.load(1, adapter(4, (0, 4, 3)))
    linear = LoraLinear(form(torch.randn(NUM_OUT, NUM_IN).to(dtype)), table, (0, "qkv"))

    def dtypes() -> list[torch.dtype]:
        residual = torch.zeros(num_tokens, NUM_OUT, dtype=dtype)
        found = [linear(x).dtype, linear.unrounded(x).dtype, linear.add_to(residual, x).dtype]
        if form is WidenedLinear and num_tokens > 1:
            found.append(linear(x.float()).dtype)  # of an activation that is not rounded yet
        return found

    table.begin_step(None)
    without = dtypes()
    table.begin_step(np.ones(num_tokens, np.int64))
    assert dtypes() == without and linear.dtype == dtype
