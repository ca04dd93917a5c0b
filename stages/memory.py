"""How large the KV cache is: what was asked for, or what the machine has room for. Plain arithmetic, no torch."""

from __future__ import annotations

import os
from pathlib import Path

from .config import EngineConfig
from .errors import ConfigError
from .limits import longest_sequence

CPU_SHARE = 0.25  # of free memory, at most, for the cache of an engine on a CPU
MEMINFO = Path("/proc/meminfo")


def num_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, room_bytes: int) -> int:
    """Blocks of the pool, [what is asked for] or what fits `room_bytes`, and no more than all slots could ever use.

    Raises `ConfigError` if they can not hold one sequence of `max_model_len` tokens: such a request could never end.
    """
    wanted = -(-max_model_len // config.block_size) * config.max_num_seqs
    if config.num_gpu_blocks is not None:
        blocks, source = config.num_gpu_blocks, "num_gpu_blocks"
    elif config.kv_cache_bytes is not None:
        blocks, source = config.kv_cache_bytes // bytes_per_block, f"kv_cache_bytes = {config.kv_cache_bytes}"
    else:
        blocks, source = min(wanted, room_bytes // bytes_per_block), "the memory that is free"
    longest = longest_sequence(max(0, blocks), config.block_size)
    if longest < max_model_len:
        needed = -(-max_model_len // config.block_size)
        raise ConfigError(
            f"max_model_len = {max_model_len} needs {needed} blocks of {config.block_size} tokens "
            f"({needed * bytes_per_block / 2**20:.0f} MiB of KV cache), and {source} gives {max(0, blocks)}: set "
            f"max_model_len to at most {longest}, or give more with kv_cache_bytes or num_gpu_blocks"
        )
    return blocks


def num_host_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, default_gib: float) -> int:
    """Blocks of the pool for swapped sequences, 0 for none, and no more than all slots could ever use.

    Raises `ConfigError` if more memory was asked for than the machine has.
    """
    if config.num_cpu_blocks is not None:
        blocks, source = config.num_cpu_blocks, f"num_cpu_blocks = {config.num_cpu_blocks}"
    else:
        gib = default_gib if config.swap_space is None else config.swap_space
        most = -(-max_model_len // config.block_size) * config.max_num_seqs
        blocks, source = min(most, int(gib * 2**30) // bytes_per_block), f"swap_space = {gib:g} GiB"
    free = free_host_bytes()
    if blocks * bytes_per_block > free:
        if config.num_cpu_blocks is None and config.swap_space is None:
            return free // 2 // bytes_per_block
        raise ConfigError(
            f"{source} needs {blocks * bytes_per_block / 2**20:.0f} MiB of host memory, and {free / 2**20:.0f} MiB are "
            "free: lower it"
        )
    return blocks


def cpu_room_bytes() -> int:
    """What an engine on a CPU takes for its cache if nobody says: a quarter of the memory that is free."""
    return int(free_host_bytes() * CPU_SHARE)


def free_host_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no Linux: half of what there is
