"""Slabs: what fits, what is lost, and what one sequence needs."""

from __future__ import annotations

import pytest

from millrace.kernels.layout.kv_layout import KindName, KVKind, KVLayout

KIB, MIB = 2**10, 2**20


def kind(num_layers: int, layer_bytes: int, window: int | None = None, name: KindName | None = None) -> KVKind:
    layers = tuple(range(num_layers))
    return KVKind(name or ("window" if window else "full"), layers, window, 1, 8, 8, num_layers * layer_bytes)


@pytest.mark.parametrize(
    ("full", "window", "blocks"),
    [(3, 15, (80, 16)), (5, 29, (116, 20)), (10, 52, (104, 20)), (12, 12, (16, 16)), (8, 24, (48, 16))],
)
def test_common_mixes_of_layers_lose_nothing_of_a_slab(full: int, window: int, blocks: tuple[int, int]) -> None:
    layout = KVLayout.of([kind(full, 16 * KIB), kind(window, 16 * KIB, 512)], 16, 8 * 2**30)
    assert layout.blocks_per_slab == blocks
    for each, count in zip(layout.kinds, blocks, strict=True):
        assert count * each.block_bytes == layout.slab_bytes


@pytest.mark.parametrize("layer_bytes", [96, 1000, 4096, 18_688])
@pytest.mark.parametrize(("full", "window"), [(1, 1), (2, 7), (11, 13), (1, 37)])
def test_blocks_of_a_kind_lie_at_one_distance_that_divides_the_slab(layer_bytes: int, full: int, window: int) -> None:
    layout = KVLayout.of([kind(full, layer_bytes), kind(window, layer_bytes, 64)], 16, 1000 * MIB)
    for k, each in enumerate(layout.kinds):
        assert layout.block_stride(k) * layout.blocks_per_slab[k] == layout.slab_bytes
        assert each.block_bytes <= layout.block_stride(k)
        assert layout.block_stride(k) % min(64, each.block_bytes & -each.block_bytes) == 0
    assert 0 <= 1000 * MIB - layout.total_bytes < layout.slab_bytes


def test_with_one_kind_the_ids_are_those_of_a_pool_without_slabs() -> None:
    layout = KVLayout.of([kind(4, 1000)], 16, 4000 * 37 + 1)
    assert layout.num_blocks == (37,) and layout.blocks_per_slab == (16,) and layout.num_slabs == 3
    assert layout.block_stride(0) == 4000 and layout.total_bytes == 37 * 4000
    assert layout.place == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_a_small_cache_has_small_slabs() -> None:
    layout = KVLayout.of([kind(1, 1024), kind(3, 1024, 8)], 4, 40 * 3 * 1024)
    assert layout.blocks_per_slab == (3, 1) and layout.num_slabs == 40 and layout.num_blocks == (120, 40)


def test_a_cache_without_room_for_a_slab_has_none() -> None:
    layout = KVLayout.of([kind(1, 1024), kind(3, 1024, 8)], 4, 3 * 1024 - 1)
    assert layout.num_slabs == 0 and layout.num_blocks == (0, 0) and layout.total_bytes == 0


def test_a_cache_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        KVLayout.of([], 16, 1024)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_a_window_holds_at_most_what_a_chunk_sees_at_the_worst_alignment(window: int, chunk: int) -> None:
    size, longest = 4, 40
    layout = KVLayout.of([kind(1, 64), kind(1, 64, window)], size, MIB)
    most = 0
    for start in range(longest):
        end = min(start + chunk, longest)
        most = max(most, -(-end // size) - max(0, start - window + 1) // size)
    assert layout.most_blocks(1, longest, chunk) == most
    assert layout.most_blocks(0, longest, chunk) == 10


def test_one_sequence_needs_whole_slabs_of_each_kind() -> None:
    layout = KVLayout.of([kind(1, 1024), kind(3, 1024, 8)], 4, 40 * 3 * 1024)
    # 10 blocks of 3 a slab, and of the window at most 3, of 1 a slab
    assert layout.slabs_of_one(40) == 4 + 3
    assert layout.slabs_of_one(1) == 2 and layout.slabs_of_one(5) == 1 + 2


def test_host_memory_is_split_as_sequences_of_four_windows_hold_it() -> None:
    layout = KVLayout.of([kind(1, 1024), kind(3, 1024, 8)], 4, MIB)
    one = 8 * 1024 + 3 * 3 * 1024  # 32 tokens: 8 blocks, and 3 of the window
    assert layout.host_blocks(10 * one, 4096) == (80, 30)
    assert layout.host_blocks(10 * one + one - 1, 4096)[0] < 88
    assert layout.host_blocks(5 * (2 + 2 * 3) * 1024, 8) == (10, 10), "no sequence is as long as the window"
    assert KVLayout.of([kind(4, 1000)], 16, MIB).host_blocks(41_999, 100) == (10,)


def test_gemma_3_of_270m_holds_over_five_times_the_tokens_at_32k() -> None:
    """18 layers of 1 KiB a token: 32k tokens take 576 MiB uniformly, and 104 MiB by kinds."""
    layer_bytes = 16 * KIB
    uniform = KVLayout.of([kind(18, layer_bytes)], 16, 576 * MIB)
    layout = KVLayout.of([kind(3, layer_bytes), kind(15, layer_bytes, 512)], 16, 576 * MIB)
    assert uniform.num_tokens_at(32_768) == 32_768
    assert 5.4 < layout.num_tokens_at(32_768) / 32_768 < 5.6
