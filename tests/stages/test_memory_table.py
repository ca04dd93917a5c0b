"""Sizes of the cache and of the table, from numbers that one can check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.backends.cache_size import CacheSizing, MemoryNeeds
from millrace.stages.backends.weights_fit import check_weights, least_cache_bytes
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.memory_table import MachineMemory, human

BLOCK = 1_000  # bytes, of 16 tokens
CPU = MachineMemory(device="cpu", total_bytes=90_000, limit_bytes=60_000, budget_bytes=60_000, cache_cap_bytes=10_000)
GPU = MachineMemory(
    device="cuda:0", total_bytes=90_000, limit_bytes=90_000, budget_bytes=60_000, host_free_bytes=40_000
)


def needs(length: int = 0, **other: int) -> MemoryNeeds:
    """10,000 bytes, and 10 for each token that a sequence may have."""
    return MemoryNeeds(**{"weights": 5_000, "state": 10 * length, "activations": 3_000, "logits": 2_000} | other)


def sizing(machine: MachineMemory = CPU, needs_of=needs, host_blocks: int = 0, **settings) -> CacheSizing:
    config = EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings)
    return CacheSizing(
        config=config, machine=machine, needs_of=needs_of, bytes_per_block=BLOCK, host_blocks=host_blocks
    )


def test_the_pool_is_what_was_asked_for_or_what_fits():
    roomy = MachineMemory(device="cpu", total_bytes=10**9, limit_bytes=10**9, budget_bytes=10**9)
    assert sizing(roomy).num_blocks(64) == 16  # all that four slots can use
    assert sizing(CPU, max_num_seqs=64).num_blocks(64) == 10  # the share of a CPU's memory
    assert sizing(GPU, max_num_seqs=64).num_blocks(64) == (60_000 - 10_000 - 640) // BLOCK
    assert sizing(num_gpu_blocks=5).num_blocks(64) == 5
    assert sizing(kv_cache_bytes=7_500).num_blocks(64) == 7


def test_the_total_is_the_sum_of_the_rows_and_within_the_budget():
    for machine, host_blocks in ((CPU, 0), (CPU, 3), (GPU, 0), (GPU, 3)):
        table = sizing(machine, lambda n: needs(n, other=700, sampler=800), host_blocks, max_num_seqs=64).plan(64)
        told = table.to_json()
        sizes = {row["name"]: row["bytes"] for row in told["rows"]}
        swap = host_blocks * BLOCK if machine is CPU else (4096 if host_blocks else 0)
        assert sizes["swap"] == swap and sizes["kv_cache"] == table.num_blocks * BLOCK
        assert told["total_bytes"] + told["host_bytes"] == sum(sizes.values())
        assert told["total_bytes"] <= told["budget_bytes"] == 60_000
        assert told["host_bytes"] == (0 if machine is CPU else 800 + swap)
        on_device = [row["bytes"] for row in told["rows"] if row["place"] == "device"]
        assert sum(on_device) == told["total_bytes"] == table.total_bytes
        assert ("other" in sizes) == ("sampler" in sizes) == (machine is GPU)


def test_the_estimate_for_graphs_reduces_the_cache_and_its_row_is_updated_once_known():
    plain = sizing(GPU, max_num_seqs=64).plan(64)
    with_graphs = sizing(GPU, lambda n: needs(n, graphs=4_000), max_num_seqs=64).plan(64)
    assert plain.num_blocks - with_graphs.num_blocks == 4
    assert with_graphs.row("graphs").num_bytes == 4_000
    measured = with_graphs.with_row("graphs", 2_500, "measured")
    assert with_graphs.total_bytes - measured.total_bytes == 1_500
    assert measured.row("graphs").what == "measured" and measured.num_blocks == with_graphs.num_blocks


def test_a_gpus_budget_is_used_to_the_last_block():
    table = sizing(GPU, lambda n: needs(n, other=700), max_num_seqs=64).plan(64)
    assert 0 <= table.machine.budget_bytes - table.total_bytes < BLOCK


def test_a_pool_of_swapped_blocks_on_a_cpu_is_taken_from_the_same_memory():
    tight = MachineMemory(
        device="cpu", total_bytes=90_000, limit_bytes=30_000, budget_bytes=30_000, cache_cap_bytes=18_000
    )
    assert sizing(tight, max_num_seqs=64).plan(64).num_blocks == 18
    assert sizing(tight, host_blocks=12, max_num_seqs=64).plan(64).num_blocks == (30_000 - 10_640 - 12_000) // BLOCK


def test_the_table_says_how_many_whole_sequences_the_cache_holds():
    table = sizing(num_gpu_blocks=11).plan(33)  # three blocks each
    assert (table.num_tokens, table.num_longest) == (176, 3)
    what = "11 blocks of 16 tokens, 0.977 KiB each: 176 tokens, 3 sequences of 33 tokens at once"
    assert table.row("kv_cache").what == what
    assert table.to_json()["kv_cache"] == {
        "num_blocks": 11,
        "block_size": 16,
        "bytes_per_block": BLOCK,
        "num_tokens": 176,
        "num_longest_sequences": 3,
    }


def test_the_log_line_and_the_terminal_tell_every_row():
    table = sizing(GPU, lambda n: needs(n, other=700, sampler=800), host_blocks=2).plan(64)
    event, lines = table.to_event(), table.to_text()
    for row in table.rows:
        assert event[f"{row.name}_bytes"] == row.num_bytes
        (line,) = (line for line in lines if line.startswith(row.name))
        assert human(row.num_bytes) in line and row.what in line
    assert event["total_bytes"] == table.total_bytes and event["host_bytes"] == 800 + 2048
    assert [line.split()[0] for line in lines if "total" in line] == ["total", "host"]


def test_sizes_are_told_with_three_digits():
    sizes = {0: "0 B", 999: "999 B", 1_000: "0.977 KiB", 1024: "1 KiB", 1536: "1.5 KiB", 123 * 2**20: "123 MiB"}
    assert {size: human(size) for size in sizes} == sizes
    assert human(2**50) == "1024 TiB"


# -- too little


def told(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(caught.value)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_the_length_that_is_said_to_fit_is_the_longest_that_does(machine):
    asked = sizing(machine)
    with pytest.raises(ConfigError) as caught:
        asked.plan(100_000)
    longest = int(told(caught).split("at most ")[1].split(",")[0])
    assert asked.plan(longest).num_tokens >= longest
    with pytest.raises(ConfigError, match=f"at most {longest}"):
        asked.plan(longest + 1)


def test_an_error_names_what_takes_the_memory_and_the_setting_that_gives_more():
    with pytest.raises(ConfigError) as caught:
        sizing(GPU, lambda n: needs(n, other=700)).plan(100_000)
    for words in ("max_model_len = 100000 needs 6250 blocks of 16 tokens", "cuda:0", "weights (4.88 KiB)", "other"):
        assert words in told(caught)
    assert "raise gpu_memory_utilization = 0.9" in told(caught)
    with pytest.raises(ConfigError, match="the 9.77 KiB that cpu has for it .* kv_cache_bytes"):
        sizing(CPU).plan(1_000)
    with pytest.raises(
        ConfigError, match="num_gpu_blocks = 3 gives 3: set max_model_len to at most 48, or to auto, or"
    ):
        sizing(num_gpu_blocks=3).plan(64)


def test_where_nothing_fits_no_length_is_recommended():
    full = lambda length: needs(length, weights=60_000)  # noqa: E731
    with pytest.raises(
        ConfigError, match="no sequence fits, however short: raise .* or choose a smaller model"
    ) as caught:
        sizing(GPU, full).plan(64)
    assert "at most" not in told(caught) and "the 0 B that cuda:0 has" in told(caught)


@pytest.mark.parametrize("settings", [{"num_gpu_blocks": 70}, {"kv_cache_bytes": 70_000}])
@pytest.mark.parametrize(("machine", "most"), [(CPU, 49), (GPU, 79)])
def test_a_cache_larger_than_the_memory_is_refused_with_the_blocks_that_fit(machine, most, settings):
    settings = {name: value * 2 for name, value in settings.items()}
    with pytest.raises(ConfigError, match=f"at most {most} blocks .{most}000 bytes., which hold {16 * most}") as caught:
        sizing(machine, **settings).plan(64)
    assert f"{next(iter(settings))} = " in told(caught) and "weights (4.88 KiB)" in told(caught)
    assert sizing(machine, num_gpu_blocks=most).plan(64).total_bytes <= machine.limit_bytes
    with pytest.raises(ConfigError):
        sizing(machine, num_gpu_blocks=most + 1).plan(64)


def test_a_pool_for_swapped_sequences_larger_than_host_memory_is_refused():
    machine = replace(GPU, host_free_bytes=32_768)
    assert sizing(machine, host_blocks=32).plan(64).host_bytes == machine.host_free_bytes, "by a power of two"
    with pytest.raises(ConfigError, match="memory, of which 32 KiB is free: make the pool smaller by 32 KiB"):
        sizing(machine, host_blocks=33).plan(64)


def test_weights_larger_than_free_memory_are_refused_before_they_are_loaded():
    check_weights(2**30, 2**30, "cpu", "float32")
    with pytest.raises(
        ConfigError, match="take 2 GiB as float32, and cpu has 1 GiB free: dtype = bfloat16 takes 1 GiB and fits; or"
    ):
        check_weights(2**31, 2**30, "cpu", "float32")
    with pytest.raises(ConfigError, match="as bfloat16, and cuda:0 has 1 GiB free: choose a smaller model"):
        check_weights(2**31, 2**30, "cuda:0", "bfloat16")
    with pytest.raises(ConfigError, match="as bfloat16, and cpu has 1 GiB free: choose a smaller model"):
        check_weights(2**31, 2**30, "cpu", "bfloat16")


# -- auto


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_auto_is_the_longest_that_fits_and_no_longer_than_the_model(machine):
    longest = sizing(machine).longest(100_000)
    table = sizing(machine, max_model_len="auto").plan(100_000)
    assert table.max_model_len == longest and table.num_longest == 1
    assert table.num_tokens - longest < 16 and table.total_bytes <= machine.budget_bytes
    assert sizing(machine, max_model_len="auto").plan(longest + 1).max_model_len == longest
    assert sizing(machine, max_model_len="auto").plan(40).max_model_len == 40


def test_auto_fits_a_pool_whose_size_is_given():
    assert sizing(max_model_len="auto", num_gpu_blocks=3).plan(64).max_model_len == 48
    assert sizing(max_model_len="auto", kv_cache_bytes=2_999).plan(64).max_model_len == 32


def test_auto_does_not_fit_where_not_even_two_tokens_do():
    with pytest.raises(ConfigError, match="max_model_len = auto, or 64 needs 4 blocks .* gives 0: no sequence fits"):
        sizing(max_model_len="auto", kv_cache_bytes=999).plan(64)
    assert sizing(max_model_len="auto", num_gpu_blocks=1, block_size=2).plan(64).max_model_len == 2
    with pytest.raises(ConfigError, match="no sequence fits"):
        sizing(max_model_len="auto", num_gpu_blocks=1, block_size=1).plan(64)


@given(
    budget=st.integers(0, 200_000),
    share=st.none() | st.integers(0, 60_000),
    by_token=st.integers(0, 50),
    host_blocks=st.integers(0, 20),
    num_seqs=st.integers(1, 64),
    at_most=st.integers(2, 2_000),
)
def test_every_shorter_sequence_fits_and_no_longer_one_does(budget, share, by_token, host_blocks, num_seqs, at_most):
    machine = MachineMemory(
        device="cpu", total_bytes=budget, limit_bytes=budget, budget_bytes=budget, cache_cap_bytes=share
    )
    asked = sizing(machine, lambda n: needs(n, state=by_token * n), host_blocks, max_num_seqs=num_seqs)
    longest = asked.longest(at_most)
    assert [asked.fits(length) for length in range(1, at_most + 1)] == [n <= longest for n in range(1, at_most + 1)]
    if longest:
        assert asked.plan(longest).total_bytes <= budget


# -- windows that free memory

ROOMY = MachineMemory(device="cpu", total_bytes=10**9, limit_bytes=10**9, budget_bytes=10**9)


def windowed(num_bytes: int, length: int) -> KVLayout:
    """One layer that keeps all tokens and four that keep 32 of them, of 200 bytes a block each."""
    kinds = [
        KVKind("full", (4,), None, 1, 1, 1, BLOCK // 5),
        KVKind("window", (0, 1, 2, 3), 32, 1, 1, 1, 4 * BLOCK // 5),
    ]
    return KVLayout.of(kinds, 16, num_bytes)


def test_a_cache_with_windows_holds_more_tokens_and_says_how_many_times_as_many():
    table = replace(sizing(ROOMY, kv_cache_bytes=100_000), layout_of=windowed).plan(960)
    layout = table.layout
    assert layout is not None and table.num_blocks == layout.num_blocks[0] > 100
    # a sequence takes 60 blocks of 200 bytes and 3 of 800, instead of 60 of 1000
    assert table.num_longest == 6 and table.num_tokens == int(100_000 / 14_400 * 960)
    row = table.row("kv_cache")
    assert row.num_bytes == layout.total_bytes <= 100_000
    assert f"{table.num_tokens} tokens, {table.num_longest} sequences of 960 tokens at once" in row.what
    assert "1 of 5 layers keep all tokens, 4 the last 32: 4.2 times the tokens that fit" in row.what
    told = table.to_json()["kv_cache"]
    assert [(kind["name"], kind["window"], kind["num_layers"]) for kind in told["kinds"]] == [
        ("full", None, 1),
        ("window", 32, 4),
    ]
    assert told["num_slabs"] * told["slab_bytes"] == row.num_bytes


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_the_shape_of_gpt_oss_20b_holds_almost_twice_the_tokens(length):
    half = 12 * 2 * 8 * 64 * 2 * 16  # bytes: 12 layers, K and V, 8 heads of 64 numbers of 2 bytes, 16 tokens
    full = KVKind("full", tuple(range(1, 24, 2)), None, 8, 64, 64, half)
    window = KVKind("window", tuple(range(0, 24, 2)), 128, 8, 64, 64, half)
    uniform = 4_000_000_000 // (2 * half) * 16
    assert 1.98 < KVLayout.of([full, window], 16, 4_000_000_000).num_tokens_at(length) / uniform < 2


def test_layers_that_read_anothers_cache_are_named_as_of_no_memory():
    def shared(num_bytes: int, length: int) -> KVLayout:
        layout = windowed(num_bytes, length)
        return replace(layout, place=(*layout.place, (0, 0), (1, 3)))

    what = replace(sizing(ROOMY, kv_cache_bytes=100_000), layout_of=shared).plan(960).row("kv_cache").what
    assert "1 of 7 layers keep all tokens, 4 the last 32, 2 none of their own: " in what


def test_a_sequence_fits_that_would_not_if_all_layers_kept_all_tokens():
    made = replace(sizing(kv_cache_bytes=20_000), layout_of=windowed)
    assert sizing(kv_cache_bytes=20_000).longest(4096) == 320
    longest = made.longest(4096)
    assert 1300 < longest <= 1408 and made.plan(longest).num_longest == 1
    with pytest.raises(ConfigError, match=rf"max_model_len = {longest + 1} needs .* set max_model_len to at most"):
        made.plan(longest + 1)


def test_a_prompt_that_is_not_split_needs_all_its_blocks_in_one_step_of_windows_too():
    split = {"kv_cache_bytes": 20_000, "max_num_batched_tokens": 4096}
    made = replace(sizing(**split, enable_chunked_prefill=False), layout_of=windowed)
    longest = made.longest(4096)
    assert 280 <= longest <= 320 < replace(sizing(**split), layout_of=windowed).longest(4096)
    with pytest.raises(ConfigError, match=rf"max_model_len = {longest + 1} needs"):
        made.plan(longest + 1)


def test_a_cache_with_windows_is_no_larger_than_all_slots_can_use():
    table = replace(sizing(ROOMY), layout_of=windowed).plan(960)
    assert 4 <= table.num_longest <= 12
    assert table.row("kv_cache").num_bytes < sizing(ROOMY).plan(960).row("kv_cache").num_bytes


def test_the_least_cache_before_loading_is_that_of_windows():
    config = EngineConfig(block_size=16)
    assert least_cache_bytes(config, BLOCK, 960) == 60 * BLOCK
    assert 14_400 <= least_cache_bytes(config, BLOCK, 960, windowed) <= 16_000
