"""Sizes of the cache and of the table, from numbers that one can check by hand."""

from __future__ import annotations

import pytest

from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.memory import Machine, human
from millrace.stages.sizing import Needs, Sizing

BLOCK = 1_000  # bytes, of 16 tokens
CPU = Machine(device="cpu", total_bytes=90_000, limit_bytes=60_000, budget_bytes=60_000, cache_cap_bytes=10_000)
GPU = Machine(device="cuda:0", total_bytes=90_000, limit_bytes=90_000, budget_bytes=60_000, host_free_bytes=40_000)


def needs(length: int = 0, **other: int) -> Needs:
    """10,000 bytes, and 10 for each token that a sequence may have."""
    return Needs(**{"weights": 5_000, "state": 10 * length, "activations": 3_000, "logits": 2_000} | other)


def sizing(machine: Machine = CPU, needs_of=needs, host_blocks: int = 0, **settings) -> Sizing:
    config = EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings)
    return Sizing(config=config, machine=machine, needs_of=needs_of, bytes_per_block=BLOCK, host_blocks=host_blocks)


def test_the_pool_is_what_was_asked_for_or_what_fits():
    roomy = Machine(device="cpu", total_bytes=10**9, limit_bytes=10**9, budget_bytes=10**9)
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
        assert sizes["swap"] == host_blocks * BLOCK and sizes["kv_cache"] == table.num_blocks * BLOCK
        assert told["total_bytes"] + told["host_bytes"] == sum(sizes.values())
        assert told["total_bytes"] <= told["budget_bytes"] == 60_000
        assert told["host_bytes"] == (0 if machine is CPU else 800 + host_blocks * BLOCK)
        on_device = [row["bytes"] for row in told["rows"] if row["place"] == "device"]
        assert sum(on_device) == told["total_bytes"] == table.total_bytes
        assert ("other" in sizes) == ("sampler" in sizes) == (machine is GPU)


def test_a_gpus_budget_is_used_to_the_last_block():
    table = sizing(GPU, lambda n: needs(n, other=700), max_num_seqs=64).plan(64)
    assert 0 <= table.machine.budget_bytes - table.total_bytes < BLOCK


def test_a_pool_of_swapped_blocks_on_a_cpu_is_taken_from_the_same_memory():
    tight = Machine(device="cpu", total_bytes=90_000, limit_bytes=30_000, budget_bytes=30_000, cache_cap_bytes=18_000)
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
    assert event["total_bytes"] == table.total_bytes and event["host_bytes"] == 2_800
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
    with pytest.raises(ConfigError, match="num_gpu_blocks = 3 gives 3: set max_model_len to at most 48, or give more"):
        sizing(num_gpu_blocks=3).plan(64)


def test_where_nothing_fits_no_length_is_recommended():
    full = lambda length: needs(length, weights=60_000)  # noqa: E731
    with pytest.raises(
        ConfigError, match="no sequence fits, however short: raise .* or choose a smaller model"
    ) as caught:
        sizing(GPU, full).plan(64)
    assert "at most" not in told(caught) and "the 0 B that cuda:0 has" in told(caught)
