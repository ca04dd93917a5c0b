"""The kinds of memory of real configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.model.families.registry import parse_config
from millrace.model.kv_kinds import CachedMixer, kv_kinds, kv_layout
from millrace.model.spec import AttentionSpec, DecoderSpec, LatentSpec, RecurrentSpec
from tests.model.checkpoints import SHAPE

LLAMA = parse_config({"model_type": "llama", **SHAPE}, "")
LAYER = LLAMA.layers[0]
LATENT = LatentSpec(num_heads=4, q_rank=None, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8, scale=1.0)


def block_bytes(mixer: CachedMixer) -> int:
    """Of blocks of four tokens in two bytes a number."""
    if isinstance(mixer, LatentSpec):
        return 4 * 2 * (mixer.kv_rank + mixer.rope_dim)
    return 4 * 2 * mixer.num_kv_heads * (mixer.head_dim + (mixer.value_dim or mixer.head_dim))


def decoder(*mixers: Any) -> DecoderSpec:
    return replace(LLAMA, layers=tuple(replace(LAYER, mixer=mixer) for mixer in mixers))


def attending(**fields: Any) -> AttentionSpec:
    return replace(LLAMA.attention, **fields)


FULL, WINDOW = attending(), attending(window=8)


def test_layers_that_see_all_are_kind_0_whichever_comes_first() -> None:
    kinds = kv_kinds(decoder(WINDOW, WINDOW, FULL, WINDOW), block_bytes)
    assert [(kind.name, kind.window, kind.layers) for kind in kinds] == [("full", None, (2,)), ("window", 8, (0, 1, 3))]
    assert kinds[1].block_bytes == 3 * kinds[0].block_bytes == 3 * block_bytes(FULL)


def test_gemma_3_has_a_full_layer_in_six() -> None:
    config = {"model_type": "gemma3_text", **SHAPE, "num_hidden_layers": 18, "head_dim": 8, "sliding_window": 512}
    kinds = kv_kinds(parse_config(config, ""), block_bytes)
    assert [(kind.name, len(kind.layers), kind.window) for kind in kinds] == [("full", 3, None), ("window", 15, 512)]
    assert kinds[0].layers == (5, 11, 17)


def test_a_decoder_of_equal_layers_is_of_one_kind() -> None:
    assert [kind.name for kind in kv_kinds(LLAMA, block_bytes)] == ["full"]


def test_a_window_that_no_sequence_exceeds_is_full() -> None:
    assert len(kv_kinds(decoder(FULL, WINDOW), block_bytes, max_model_len=8)) == 1
    assert len(kv_kinds(decoder(FULL, WINDOW), block_bytes, max_model_len=9)) == 2


def test_of_layers_of_two_sizes_one_is_full_however_short_sequences_are() -> None:
    small = attending(head_dim=8, window=8)
    kinds = kv_kinds(decoder(small, FULL, small), block_bytes, max_model_len=8)
    assert [(kind.name, kind.window, kind.layers) for kind in kinds] == [("full", None, (1,)), ("window", 8, (0, 2))]


def test_without_kinds_all_layers_are_full_as_windows_only_mask() -> None:
    (kind,) = kv_kinds(decoder(WINDOW, FULL), block_bytes, has_kinds=False)
    assert kind.name == "full" and kind.window is None and kind.layers == (0, 1)
    assert kind.block_bytes == 2 * block_bytes(FULL)


def test_without_kinds_layers_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shapes"):
        kv_kinds(decoder(FULL, attending(head_dim=24)), block_bytes, has_kinds=False)


def test_a_decoder_of_windows_only_has_a_window_as_kind_0() -> None:
    kinds = kv_kinds(decoder(WINDOW, attending(window=16)), block_bytes)
    assert [kind.window for kind in kinds] == [16, 8]


def test_a_chunk_is_a_kind_with_the_chunk_as_its_window() -> None:
    kinds = kv_kinds(decoder(attending(chunk=32), FULL, WINDOW), block_bytes)
    assert [(kind.name, kind.window) for kind in kinds] == [("full", None), ("chunk", 32), ("window", 8)]


def test_other_heads_or_a_latent_are_other_kinds() -> None:
    kinds = kv_kinds(decoder(FULL, attending(head_dim=24), LATENT), block_bytes)
    assert [(kind.name, kind.num_kv_heads, kind.key_dim, kind.value_dim) for kind in kinds] == [
        ("full", FULL.num_kv_heads, FULL.head_dim, FULL.head_dim),
        ("full", FULL.num_kv_heads, 24, 24),
        ("latent", 1, 12, 8),
    ]


def test_a_layer_that_reads_anothers_cache_has_its_place_and_no_memory() -> None:
    spec = decoder(FULL, WINDOW, attending(kv_of=0), attending(window=8, kv_of=1), RecurrentSpec(kind="gdn"))
    layout = kv_layout(spec, 4, 2**20, block_bytes)
    assert [kind.layers for kind in layout.kinds] == [(0,), (1,)]
    assert layout.place == ((0, 0), (1, 0), (0, 0), (1, 0), None)
