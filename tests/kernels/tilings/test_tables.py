"""Tables of tilings: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.kernels.layout.work_lists import AttentionShape, Tiling, decode_tiling, divide, extend_tiling
from millrace.kernels.tilings import tables
from millrace.kernels.tilings.attention import StepShape, StepTiling
from millrace.kernels.tilings.predicted import predicted_forms
from millrace.kernels.tilings.products import LIBRARY, SHARED_BYTES, ProductForm, ProductShape, why_library
from millrace.kernels.tilings.shared_memory import SMALL
from millrace.kernels.tilings.tables import Tilings, TilingsError, load_tilings, parse_table, read_table, write_table

SHAPE = ProductShape(num_outputs=4096, num_inner=1024, kind="plain", num_rows=4)
FORM = ProductForm(form="vector", block_m=4, block_n=4, block_k=1024, fuses_norm=True)
CARD = "NVIDIA H200"


def table(shape: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    plain = {"num_outputs": 4096, "num_inner": 1024, "kind": "plain", "num_rows": 4}
    entry = {"shape": plain | (shape or {}), "options": {"form": "vector", "block_m": 4} | options}
    return {"format": 1, "cards": {CARD: {"measured": "today", "product": [entry]}}}


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, many = tmp_path / "tilings.json", replace(SHAPE, num_rows=256)
    write_table(path, CARD, "today", {"product": [(many, LIBRARY, 9.0), (SHAPE, FORM, 3.1)]})
    write_table(path, "NVIDIA H100 PCIe", "later", {"product": [(SHAPE, LIBRARY, 4.0)]})
    assert read_table(path) == {
        CARD: {"product": {SHAPE: FORM, many: LIBRARY}},
        "NVIDIA H100 PCIe": {"product": {SHAPE: LIBRARY}},
    }
    found = load_tilings(str(path), CARD, 132)
    assert (found.source, found.find("product", SHAPE), found.find("product", replace(SHAPE, num_rows=5))) == (
        str(path), FORM, None,
    )  # fmt: skip
    assert found.product_forms(4096, 1024, "plain", "bfloat16") == (((4, FORM), (256, LIBRARY)), "measured")
    assert found.product_forms(4096, 1024, "add", "bfloat16")[1] == "predicted"


def test_the_shipped_table_can_be_read() -> None:
    read_table(tables.SHIPPED)
    found = load_tilings("auto", "a card without measurements", 132)
    assert found.source == "none: nothing was measured on a card without measurements"


def test_off_leaves_all_products_to_the_library() -> None:
    assert load_tilings("off", CARD, 132).product_forms(4096, 1024, "plain", "bfloat16") == ((), "tilings = off")


WRONG: list[tuple[object, str]] = [
    ([], "must be an object with names, got list"),
    ({"format": 2, "cards": {}}, "format = 2: must be 1"),
    (
        {"format": 1, "cards": {CARD: {"products": []}}},
        "NVIDIA H200: kernel 'products': must be one of product, decode, extend",
    ),
    ({"format": 1, "cards": {CARD: {"product": {}}}}, "product: must be a list of entries"),
    ({"format": 1, "cards": {CARD: {"product": [{}]}}}, r"product\[0\]: shape: must be an object"),
    (table({"rows": 3}), r"product\[0\]: shape: rows: must be among num_outputs, "),
    (table({"num_rows": 0}), "shape: num_rows = 0: must be at least 1"),
    (table({"kind": "square"}), "shape: kind = 'square': must be one of plain, gated, activated, add"),
    (table({"num_rows": 5}), "block_m = 4: must hold all num_rows = 5 with form = vector"),
    (table(num_warps=True), "options: num_warps = True: must be an integer"),
    (table(max_registers="many"), "max_registers = 'many': must be an integer or null"),
    (table(block_n=3), "block_n = 3: must be a power of two"),
    (table(block_k=128), "block_k = 128: must be a multiple of 256"),
    (table(num_splits=2), "form = vector: num_splits must be 1"),
    (table(form="split"), "block_m, block_n, block_k = 4, 1, 256: must be at least 16"),
    (
        table(form="split", block_m=16, block_n=256, num_stages=4),
        "take 557056 bytes of shared memory, must be at most 163840",
    ),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_a_wrong_table_is_named_with_its_value(content: object, message: str) -> None:
    with pytest.raises(TilingsError, match=r"tilings = t\.json.*" + message):
        parse_table(content, "t.json")


def test_a_shape_has_one_entry() -> None:
    twice = table()
    twice["cards"][CARD]["product"] *= 2
    with pytest.raises(TilingsError, match=r"product\[1\]: a second entry for ProductShape"):
        parse_table(twice, "t.json")


def test_a_file_without_the_card_or_without_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tilings.json"
    with pytest.raises(TilingsError, match=r"tilings\.json: cannot be read as JSON: .*No such file"):
        load_tilings(str(path), CARD, 132)
    path.write_text(json.dumps(table()))
    with pytest.raises(TilingsError, match="has no options for the card 'NVIDIA A100', but for NVIDIA H200"):
        load_tilings(str(path), "NVIDIA A100", 108)


def test_a_wrong_entry_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "tilings.json"
    write_table(path, CARD, "today", {"product": [(SHAPE, FORM, 3.1)]})
    before = path.read_text()
    with pytest.raises(TilingsError, match="must hold all num_rows"):
        write_table(path, CARD, "today", {"product": [(replace(SHAPE, num_rows=9), FORM, 3.1)]})
    assert path.read_text() == before and [each.name for each in tmp_path.iterdir()] == ["tilings.json"]


@pytest.mark.parametrize("size", [(4096, 1024), (1024, 2048), (1024, 3072), (28_672, 4096), (4096, 14_336), (48, 272)])
@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_a_predicted_form_can_run_its_product(size: tuple[int, int], kind: Any) -> None:
    for shared_bytes in (SMALL, SHARED_BYTES):
        forms = predicted_forms(*size, kind, "bfloat16", 132, shared_bytes, inf)
        assert [rows for rows, _ in forms] == [1, 4, 16, 32, 64], "nothing but the memory's rate is for the library"
        for rows, form in forms:
            form.check(ProductShape(num_outputs=size[0], num_inner=size[1], kind=kind, num_rows=rows))
            assert form.block_m >= rows and form.block_k * (form.num_splits - 1) < size[1]
            columns = form.block_m + (2 if kind == "gated" else 1) * form.block_n
            assert form.form == "vector" or 2 * form.num_stages * form.block_k * columns <= shared_bytes


@pytest.mark.parametrize(
    ("product", "rows"),
    [
        ((4096, 1024, "plain"), [1, 4, 16]),
        ((1024, 2048, "add"), [1, 4, 16, 32, 64]),
        ((3072, 1024, "gated"), [1, 4, 16, 32, 64]),
        ((6144, 4096, "plain"), [1, 4]),
        ((14_336, 4096, "gated"), [1, 4]),
        ((4096, 14_336, "add"), [1, 4]),
    ],
)
def test_what_shows_no_clear_margin_is_left_to_the_library(product: tuple[int, int, Any], rows: list[int]) -> None:
    """Of Qwen3-0.6B and Llama-3.1-8B on an H200, whose cuBLAS reads the 8B's weights at 0.8 of the memory's rate."""
    assert [most for most, _ in predicted_forms(*product, "bfloat16", 132)] == rows
    slow = predicted_forms(*product, "bfloat16", 128, SMALL, 1e12)
    assert {most for most, _ in slow} <= set(rows), "a slower memory hides more of what a launch takes"


@pytest.mark.parametrize(
    ("size", "dtype", "reason"),
    [
        ((64, 1024), "float32", "full precision"),
        ((64, 1032), "bfloat16", "1032 is no multiple of 16"),
        ((8, 1024), "float16", "8 x 1024 is smaller than 16 x 256"),
    ],
)
def test_products_that_do_not_qualify_say_why(size: tuple[int, int], dtype: Any, reason: str) -> None:
    assert reason in str(why_library(*size, dtype))
    assert predicted_forms(*size, "plain", dtype, 132) == ()


STEP = StepShape(group=2, head_dim=128, num_rows=64)
WIDE = StepTiling(block_m=16, block_n=64, num_warps=4, num_stages=3, occupancy=3)


def test_a_step_has_the_tiling_of_the_next_number_of_rows_that_was_measured(tmp_path: Path) -> None:
    path, narrow = tmp_path / "tilings.json", replace(WIDE, block_n=32, occupancy=4)
    write_table(path, CARD, "today", {"product": [(SHAPE, FORM, 3.1)]})
    write_table(path, CARD, "later", {"decode": [(STEP, narrow, 70.0), (replace(STEP, num_rows=256), WIDE, 280.0)]})
    found = load_tilings(str(path), CARD, 132)
    assert found.find("product", SHAPE) == FORM, "what is written of one kernel leaves the others"
    tilings = [found.attention("decode", replace(STEP, num_rows=rows)) for rows in (1, 64, 65, 256, 999)]
    assert tilings == [narrow, narrow, WIDE, WIDE, WIDE]
    others = (replace(STEP, group=4), replace(STEP, head_dim=64), replace(STEP, cache_dtype="float8_e4m3fn"))
    assert [found.attention("decode", other) for other in others] == [None] * 3
    assert found.attention("extend", STEP) is None and replace(found, is_on=False).attention("decode", STEP) is None


def test_attention_takes_the_measured_tiling_but_in_batch_invariant_mode() -> None:
    table = Tilings(CARD, "here", {"decode": {STEP: replace(WIDE, num_warps=8)}})
    shape = AttentionShape(16, 8, 128, torch.bfloat16, torch.bfloat16, tilings=table)
    assert decode_tiling(shape, 90, 3) == Tiling(16, 64, 8, 3, 3)
    own = decode_tiling(replace(shape, tilings=None), 90, 3)
    assert own == Tiling(16, 64, 4, 3, 3) == decode_tiling(shape, 90)
    assert decode_tiling(replace(shape, is_batch_invariant=True), 90, 3) == own
    assert extend_tiling(shape, 90, 3) == extend_tiling(shape, 90)


def test_a_measured_tiling_that_does_not_fit_the_card_gives_way_to_the_default() -> None:
    """3 tiles of 64 keys and values are 96 KiB, and queries 4: a block has 227 KiB at 9.0, and 99 at 8.6."""
    table = Tilings(CARD, "here", {"decode": {STEP: replace(WIDE, num_stages=4)}})
    shape = AttentionShape(16, 8, 128, torch.bfloat16, torch.bfloat16, tilings=table)
    assert decode_tiling(shape, 90, 64).num_stages == 4
    assert decode_tiling(shape, 86, 64) == decode_tiling(replace(shape, tilings=None), 86)
    (left_out,) = table.too_large(99 << 10)
    assert left_out.startswith("decode: StepTiling(block_m=16") and not table.too_large(100 << 10)


def test_a_measured_tiling_says_how_short_the_stretches_of_programs_may_be() -> None:
    table = Tilings(CARD, "here", {"decode": {STEP: replace(WIDE, min_tiles=2)}})
    shape = AttentionShape(16, 8, 128, torch.bfloat16, torch.bfloat16, tilings=table)
    found = {rows: divide("decode", shape, decode_tiling(shape, 90, rows), rows, rows, 132) for rows in (1, 64)}
    assert [division.min_tiles for division in found.values()] == [2, 2], "1 and 4 where nothing was measured"


@pytest.mark.parametrize("capability", [86, 89, 120, 133])
def test_a_card_with_little_shared_memory_takes_small_tiles(capability: int) -> None:
    """Keys and values of a tile, in as many buffers as the compiler makes, fit what a block has there."""
    for head_dim in (64, 128, 256):
        shape = AttentionShape(32, 8, head_dim, torch.bfloat16, torch.bfloat16)
        for tiling in (decode_tiling(shape, capability), extend_tiling(shape, capability)):
            assert tiling.occupancy * 2 * (tiling.num_stages - 1) * tiling.block_n * head_dim * 2 <= SMALL
    large = AttentionShape(32, 8, 128, torch.bfloat16, torch.bfloat16)
    assert extend_tiling(large, 100) == extend_tiling(large, 90) != extend_tiling(large, capability)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_n": 48}, "block_n = 48: must be a power of two"),
        ({"num_stages": 9}, "num_stages = 9: must be 1 to 8"),
        ({"min_tiles": 0}, "min_tiles = 0: must be 1 to 64, or null"),
        ({"block_m": 8}, "block_m, block_n = 8, 64: must be at least 16, 16 with group = 2"),
    ],
)
def test_a_wrong_tiling_of_attention_is_named(options: dict[str, int], message: str) -> None:
    plain = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "occupancy": 3}
    entry = {"shape": {"group": 2, "head_dim": 128, "num_rows": 64}, "options": plain | options}
    with pytest.raises(TilingsError, match=r"decode\[0\].*" + message):
        parse_table({"format": 1, "cards": {CARD: {"decode": [entry]}}}, "t.json")
