"""Tables of rotary positions whose factors depend on the length of a sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from millrace.model.decoder.rope import GrowingTables, decoder_tables, short_length, tables_bytes
from millrace.model.families.registry import parse_config
from millrace.model.rope_config import RopeConfig
from tests.families.rows.layer_norm import longrope
from tests.model.checkpoints import SHAPE

KEYS = {**SHAPE, "original_max_position_embeddings": 8, "rope_parameters": longrope(8, 8)}
SPEC = parse_config({"model_type": "phi3", **KEYS}, "")
(ROPE,) = SPEC.ropes
PLAIN = replace(ROPE, kind="default")


def theirs(num_tokens: int) -> np.ndarray:
    """cos of a sequence's positions in transformers, [num_tokens, dim / 2]."""
    positions = torch.arange(num_tokens)[None]
    cos: torch.Tensor = Phi3RotaryEmbedding(Phi3Config(**KEYS))(torch.zeros(1), positions)[0]
    return cos[0, :, :8].numpy()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_a_sequence_has_the_rows_for_its_length(length: int) -> None:
    ((cos, _),) = decoder_tables((ROPE,), 20)
    first = short_length((ROPE,), 20) if length > 8 else 0
    np.testing.assert_allclose(cos[first : first + length], theirs(length), atol=1e-6)


@pytest.mark.parametrize(("ropes", "num_positions", "num_short"), [((ROPE,), 8, 0), ((PLAIN,), 20, 0), ((ROPE,), 9, 8)])
def test_only_longer_sequences_need_rows_of_their_own(
    ropes: tuple[RopeConfig], num_positions: int, num_short: int
) -> None:
    assert short_length(ropes, num_positions) == num_short
    ((cos, sin),) = decoder_tables(ropes, num_positions)
    assert len(cos) == len(sin) == num_short + num_positions
    assert cos.nbytes + sin.nbytes == tables_bytes(replace(SPEC, ropes=ropes), num_positions)


def test_other_tables_of_the_decoder_have_each_row_twice() -> None:
    _, (cos, _) = decoder_tables((ROPE, PLAIN), 20)
    assert (cos[:8] == cos[8:16]).all() and len(cos) == 28


DYNAMIC = RopeConfig(dim=10, theta=1e4, kind="dynamic", factor=2.0, original_max_position=1500)


@pytest.mark.parametrize("ropes", [(PLAIN,), (ROPE,), (ROPE, PLAIN), (DYNAMIC, replace(PLAIN, factor=8.0)), ()])
def test_tables_that_grow_have_the_bits_of_whole_ones(ropes: tuple[RopeConfig, ...]) -> None:
    tables = GrowingTables(ropes, 2500)
    before = [pair[0].ctypes.data for pair in tables.tables]
    for length in (1, 700, 1025, 3, 2048, 2500, 4000):
        tables.grow(length)
        ready = tables.num_ready + short_length(ropes, 2500)
        assert tables.num_ready >= min(length, 2500)
        for pair, wanted in zip(tables.tables, decoder_tables(ropes, 2500), strict=True):
            for rows, whole in zip(pair, wanted, strict=True):
                assert rows[:ready].tobytes() == whole[:ready].tobytes() and not rows[ready:].any()
    assert [pair[0].ctypes.data for pair in tables.tables] == before
