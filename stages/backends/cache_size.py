"""Sizes of the KV cache, the host pool and the longest sequence.

They are as configured, or what fits the machine's memory. Plain arithmetic on the `MemoryNeeds` that `memory_needs.py`
computes.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...kernels.layout.kv_layout import KVLayout
from ...runtime.env.cgroups import memory_left, memory_limit, read
from ...runtime.env.limits import LIMIT_FLAGS, address_space_left
from ..config import EngineConfig
from ..errors import ConfigError
from ..memory_table import MachineMemory, MemoryTable, MemoryUse, human
from ..request_limits import longest_sequence

CPU_SHARE = 0.25  # of free memory, at most, for the cache of an engine on a CPU
SWAP_GIB = {"cpu": 1.0, "cuda": 4.0}  # of host memory for preempted sequences, by default
SWAP_SHARE = 0.125  # of free memory, at most, for that default
PROCESS_RESERVE_BYTES = 512 * 2**20  # of a limit of this process: libraries and stacks of threads that come later
ROOT = Path("/")  # root of the file system whose /proc and /sys describe memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory an engine needs besides its KV cache, in bytes, for some sequence length."""

    weights: int
    state: int  # tables of positions and blocks, and on a CPU of the sampler
    activations: int  # of the largest step
    logits: int  # of the largest number of rows, sampling included
    other: int = 0  # on a GPU: driver, kernels' code, other processes
    sampler: int = 0  # with a GPU: the sampler's tables, in host memory
    graphs: int = 0  # on a GPU: memory of captured CUDA graphs
    adapters: int = 0  # device slots of LoRA adapters
    recurrent: int = 0  # states of recurrent layers, of all slots
    snapshots: int = 0  # the same, of cached prefixes

    def of_device(self) -> int:
        """The bytes on the device: all but `sampler`."""
        rest = self.activations + self.logits + self.graphs + self.adapters + self.recurrent
        rest += self.snapshots
        return self.other + self.weights + self.state + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizing:
    """The sizes for one model on one machine.

    `needs_of(length)` are the needs for sequences of up to `length` tokens; they never decrease with the length.
    """

    config: EngineConfig
    machine: MachineMemory
    needs_of: Callable[[int], MemoryNeeds]
    bytes_per_block: int  # of all layers
    host_blocks: int = 0  # of the pool for sequences that are swapped out; as large in bytes, of several kinds
    # The layout of a cache of so many bytes, for sequences of up to a length; None: all layers keep all tokens.
    layout_of: Callable[[int, int], KVLayout | None] = lambda num_bytes, length: None
    # With sequences of up to a length: which layers keep keys that no query sees, and why; "" if none do.
    about_masks: Callable[[int], str] = lambda length: ""

    def plan(self, max_model_len: int) -> MemoryTable:
        """The memory table for sequences of up to `max_model_len` tokens.

        With `max_model_len = auto` in the configuration, the length is reduced to what fits. Raises `ConfigError`,
        which says what would fit.
        """
        if not self.fits(max_model_len):
            longest = self.longest(max_model_len)
            if self.config.max_model_len != "auto" or longest < 2:
                raise self._too_small(max_model_len, longest)
            max_model_len = longest
        layout = self.layout(max_model_len)
        table = MemoryTable(
            machine=self.machine,
            rows=self._rows(max_model_len),
            max_model_len=max_model_len,
            num_blocks=self.num_blocks(max_model_len),
            block_size=self.config.block_size,
            bytes_per_block=self.bytes_per_block,
            layout=layout,
        )
        self._check_totals(table)
        return table

    def layout(self, max_model_len: int) -> KVLayout | None:
        """The layout of a cache in which windows free memory: as large as configured, or as fits and slots can use.

        `num_gpu_blocks` are blocks of all layers. None: all layers keep all tokens.
        """
        config = self.config
        if config.num_gpu_blocks is not None:
            return self.layout_of(config.num_gpu_blocks * self.bytes_per_block, max_model_len)
        if config.kv_cache_bytes is not None:
            return self.layout_of(config.kv_cache_bytes, max_model_len)
        available = max(0, self._available_bytes(max_model_len))
        layout = self.layout_of(available, max_model_len)
        if layout is None:
            return None
        wanted = layout.slabs_of_one(max_model_len, min(max_model_len, config.num_step_tokens)) * layout.slab_bytes
        return self.layout_of(min(available, wanted * config.max_num_seqs), max_model_len)

    def num_blocks(self, max_model_len: int) -> int:
        """Blocks of the pool: as configured, or as many as fit and all slots can ever use. Of kind 0 with a layout."""
        config = self.config
        if (layout := self.layout(max_model_len)) is not None:
            return layout.num_blocks[0]
        if config.num_gpu_blocks is not None:
            return config.num_gpu_blocks
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes // self.bytes_per_block
        wanted = self._blocks_of(max_model_len) * config.max_num_seqs
        return max(0, min(wanted, self._available_bytes(max_model_len) // self.bytes_per_block))

    def fits(self, max_model_len: int) -> bool:
        """Whether the pool holds one sequence of this length.

        A sequence that it does not hold could never finish.
        """
        if (layout := self.layout(max_model_len)) is not None:
            return layout.num_at_once(max_model_len, self._least_chunk(max_model_len)) > 0
        return longest_sequence(self.num_blocks(max_model_len), self.config.block_size) >= max_model_len

    def _least_chunk(self, length: int) -> int:
        """Tokens of a sequence that one step must compute: if prompts are not split, a window holds them all."""
        return 1 if self.config.enable_chunked_prefill else length

    def longest(self, at_most: int) -> int:
        """The longest sequence that fits; 0 if none does.

        Binary search: any shorter sequence fits too.
        """
        return bisect_left(range(1, at_most + 1), True, key=lambda length: not self.fits(length))

    # -- the parts

    def _blocks_of(self, length: int) -> int:
        return -(-length // self.config.block_size)

    def _available_bytes(self, max_model_len: int) -> int:
        """Bytes for a cache whose size is not configured; negative if the other needs do not fit."""
        swap_bytes = self.host_blocks * self.bytes_per_block if self.machine.is_host else 0
        needs = self.needs_of(max_model_len)
        left = self.machine.budget_bytes - needs.of_device() - swap_bytes
        cap = self.machine.cache_cap_bytes
        return left if cap is None else min(left, cap - needs.snapshots)

    def _rows(self, max_model_len: int) -> tuple[MemoryUse, ...]:
        config, needs, is_host = self.config, self.needs_of(max_model_len), self.machine.is_host
        cache_bytes = self._cache_bytes(max_model_len)
        how = "computed" if is_host else "measured"
        held = "blocks and states" if needs.recurrent else f"{self.host_blocks} blocks"
        swap = f"{held} of sequences that are swapped out" if self.host_blocks else "not used"
        swap_bytes = pool_bytes(self.host_blocks, self.bytes_per_block, is_pinned=not is_host)
        rows = [
            MemoryUse("weights", needs.weights, f"the model's tensors{_kept_as(config.quantized_to)}, measured"),
            MemoryUse("state", needs.state, f"tables for {config.max_num_seqs} sequences of {max_model_len} tokens"),
            MemoryUse("activations", needs.activations, f"a step of {config.num_step_tokens} tokens, {how}"),
            MemoryUse("logits", needs.logits, _about_logits(config, is_host=is_host)),
            MemoryUse("graphs", needs.graphs, "CUDA graphs, estimated" if needs.graphs else "not used"),
            MemoryUse("kv_cache", cache_bytes, self._about_cache(max_model_len)),
            MemoryUse("swap", swap_bytes, swap, "device" if is_host else "host"),
        ]
        if needs.adapters:
            slots = f"{config.max_loras} device slots of LoRA adapters of rank {config.max_lora_rank}"
            rows.insert(1, MemoryUse("adapters", needs.adapters, slots))
        if needs.recurrent:
            each = human(needs.recurrent // config.max_num_seqs)
            about = f"recurrent layers' state of {config.max_num_seqs} sequences, {each} each"
            rows.insert(1, MemoryUse("recurrent", needs.recurrent, about))
        if needs.snapshots:
            count = needs.snapshots * config.max_num_seqs // needs.recurrent
            rows.insert(
                2, MemoryUse("snapshots", needs.snapshots, f"recurrent layers' state of {count} cached prefixes")
            )
        if not is_host:
            rows.append(MemoryUse("other", needs.other, "driver, kernels' code, other processes"))
            rows.append(MemoryUse("sampler", needs.sampler, "its tables and what it sorts", "host"))
        return tuple(rows)

    def _cache_bytes(self, max_model_len: int) -> int:
        layout = self.layout(max_model_len)
        return self.num_blocks(max_model_len) * self.bytes_per_block if layout is None else layout.total_bytes

    def _about_cache(self, max_model_len: int) -> str:
        size, dtype = self.config.block_size, self.config.kv_cache_dtype
        layout, kept = self.layout(max_model_len), _kept_as(None if dtype == "auto" else dtype)
        if layout is not None:
            return _about_layout(layout, max_model_len, kept, layout.total_bytes // self.bytes_per_block * size)
        blocks = self.num_blocks(max_model_len)
        each = f"{blocks} blocks of {size} tokens{kept}, {human(self.bytes_per_block)} each: {blocks * size} tokens"
        masks = self.about_masks(max_model_len)
        num_at_once = f"{blocks // self._blocks_of(max_model_len)} sequences of {max_model_len} tokens at once"
        return f"{each}, {num_at_once}" + (f"; {masks}" if masks else "")

    # -- what does not fit

    def _check_totals(self, table: MemoryTable) -> None:
        """Raises `ConfigError` if a configured cache, or the host pool, exceeds the memory."""
        machine, length = self.machine, table.max_model_len
        over_bytes = table.total_bytes - machine.limit_bytes
        if over_bytes > 0:
            cache = human(table.row("kv_cache").num_bytes)
            num_blocks = table.row("kv_cache").num_bytes // self.bytes_per_block
            most = max(0, num_blocks - -(-over_bytes // self.bytes_per_block))
            layout = self.layout_of(most * self.bytes_per_block, length)
            num_tokens = most * table.block_size if layout is None else layout.num_tokens_at(length)
            raise ConfigError(
                f"{self._source(length)} makes a KV cache of {cache}, and {machine.device} has "
                f"{human(machine.limit_bytes)} for it and {self._rest(length)}: give it at most {most} blocks "
                f"({most * self.bytes_per_block} bytes), which hold {num_tokens} tokens"
            )
        if machine.host_free_bytes is not None and table.host_bytes > machine.host_free_bytes:
            swap, free = human(table.row("swap").num_bytes), human(machine.host_free_bytes)
            raise ConfigError(
                f"the pool for swapped sequences ({swap}) and the sampler take {human(table.host_bytes)} of the host's "
                f"memory, of which {free} is free: make the pool smaller by "
                f"{human(table.host_bytes - machine.host_free_bytes)}"
            )

    def _too_small(self, max_model_len: int, longest: int) -> ConfigError:
        layout = self.layout(max_model_len)
        blocks, needed = self.num_blocks(max_model_len), self._blocks_of(max_model_len)
        if layout is not None:  # in blocks of all layers, as the settings are
            blocks = layout.total_bytes // self.bytes_per_block
            one = layout.slabs_of_one(max_model_len, self._least_chunk(max_model_len)) * layout.slab_bytes
            needed = max(blocks + 1, -(-one // self.bytes_per_block))
        if longest >= 2:
            mend = f"set max_model_len to at most {longest}, or to auto, or {self._more()}"
        else:
            mend = f"no sequence fits, however short: {self._more()}, or choose a smaller model"
        auto_prefix = "auto, or " if self.config.max_model_len == "auto" else ""
        return ConfigError(
            f"max_model_len = {auto_prefix}{max_model_len} needs {needed} blocks of {self.config.block_size} tokens "
            f"({human(needed * self.bytes_per_block)} of KV cache), and {self._source(max_model_len)} gives {blocks}: "
            f"{mend}"
        )

    def _source(self, max_model_len: int) -> str:
        """What determines the size of the cache, for error texts."""
        config = self.config
        if config.num_gpu_blocks is not None:
            return f"num_gpu_blocks = {config.num_gpu_blocks}"
        if config.kv_cache_bytes is not None:
            return f"kv_cache_bytes = {config.kv_cache_bytes}"
        available = human(max(0, self._available_bytes(max_model_len)))
        return f"the {available} that {self.machine.device} has for it beside {self._rest(max_model_len)}"

    def _rest(self, max_model_len: int) -> str:
        rows = [row for row in self._rows(max_model_len) if row.place == "device" and row.name != "kv_cache"]
        return ", ".join(f"{row.name} ({human(row.num_bytes)})" for row in rows if row.num_bytes)

    def _more(self) -> str:
        config = self.config
        if config.num_gpu_blocks is not None or config.kv_cache_bytes is not None:
            return "give more with kv_cache_bytes or num_gpu_blocks"
        if self.machine.is_host:
            return f"{memory_advice()}, or give more than {CPU_SHARE:.0%} of what is free with kv_cache_bytes"
        return f"raise gpu_memory_utilization = {config.gpu_memory_utilization}, or lower max_num_batched_tokens"


def _about_layout(layout: KVLayout, max_model_len: int, kept: str, num_uniform: int) -> str:
    """`num_uniform`: tokens that the same memory holds if all layers keep all tokens."""
    num_tokens, num_at_once = layout.num_tokens_at(max_model_len), layout.num_at_once(max_model_len)
    first, *others = (
        f"{len(kind.layers)}{{}} {'all tokens' if kind.window is None else f'the last {kind.window}'}"
        for kind in layout.kinds
    )
    others = [other.format("") for other in others]
    num_shared = sum(place is not None for place in layout.place) - sum(len(kind.layers) for kind in layout.kinds)
    if num_shared:
        others.append(f"{num_shared} none of their own")
    layers = ", ".join([first.format(f" of {len(layout.place)} layers keep"), *others])
    return (
        f"{num_tokens} tokens{kept}, {num_at_once} sequences of {max_model_len} tokens at once; {layers}: "
        f"{num_tokens / max(1, num_uniform):.1f} times the tokens that fit if all layers kept all"
    )


def _about_logits(config: EngineConfig, *, is_host: bool) -> str:
    if is_host:
        return f"{config.max_num_seqs} rows, and choosing tokens from them"
    num_rows = config.max_num_seqs + config.num_verified_tokens
    return f"{num_rows} rows, choosing tokens from them, and a piece of scored prompts"


def _kept_as(form: str | None) -> str:
    return "" if form is None else f" in {form}"


# -- the host


def num_host_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, device: str) -> int:
    """Blocks of the host pool for swapped sequences: at most what all slots could ever use.

    For a `cuda` device the pool is pinned, and its size is rounded up (see `pool_bytes`). A default size is chosen so
    that the rounded pool fits. Raises `ConfigError` if a configured size exceeds the free host memory.
    """
    free = free_host_share(config)
    most = -(-max_model_len // config.block_size) * config.max_num_seqs
    if config.num_cpu_blocks is not None:
        blocks, source = config.num_cpu_blocks, f"num_cpu_blocks = {config.num_cpu_blocks}"
    elif config.swap_space is not None:
        wanted = int(config.swap_space * 2**30) // bytes_per_block
        blocks, source = min(most, wanted), f"swap_space = {config.swap_space:g} GiB"
    else:
        budget_bytes = int(min(SWAP_GIB[device] * 2**30, free * SWAP_SHARE))
        if device == "cuda":
            budget_bytes = 1 << (budget_bytes.bit_length() - 1) if budget_bytes else 0
        return min(most, budget_bytes // bytes_per_block)
    taken = pool_bytes(blocks, bytes_per_block, is_pinned=device == "cuda")
    if taken > free:
        needs = f"{source} needs {human(taken)} of host memory"
        raise ConfigError(f"{needs}, and {human(free)} are free: lower it, or {memory_advice()}")
    return blocks


def host_blocks_by_kind(memory: MemoryTable, host_blocks: int) -> tuple[int, ...]:
    """Host blocks of each kind, in the memory of `host_blocks` of all layers."""
    if memory.layout is None:
        return (host_blocks,)
    found = memory.layout.host_blocks(host_blocks * memory.bytes_per_block, memory.max_model_len)
    return found if all(found) else (0,) * len(found)


def pool_bytes(num_blocks: int, bytes_per_block: int, *, is_pinned: bool) -> int:
    """Bytes that a host pool takes.

    Torch rounds pinned memory up to a power of two, so up to twice the size.
    """
    num_bytes = num_blocks * bytes_per_block
    return 1 << (num_bytes - 1).bit_length() if is_pinned and num_bytes else num_bytes


def free_host_bytes() -> int:
    """Host memory available without swapping, within the limits of the control group and of this process."""
    return min(left for left in (_machine_free_bytes(), memory_left(ROOT), _process_left()) if left is not None)


def free_host_share(config: EngineConfig) -> int:
    """What an engine may take of `free_host_bytes`: the other processes of a fleet take as much, at the same time."""
    return free_host_bytes() // config.data_parallel_size


def total_host_bytes() -> int:
    """Memory of the machine, or the limit of its control group if that is lower."""
    total, limit = _machine_bytes(), memory_limit(ROOT)
    return total if limit is None else min(total, limit)


def host_limit() -> str:
    """The limit that determines `free_host_bytes`; empty if the machine does."""
    free = free_host_bytes()
    if free == _machine_free_bytes():
        return ""
    return f"this process's limit ({LIMIT_FLAGS})" if free == _process_left() else "the container's limit"


def memory_advice() -> str:
    """How this process gets more memory."""
    if not (limit := host_limit()):
        return "free memory"
    return "raise the container's memory limit" if "container" in limit else f"raise {limit}"


def _process_left() -> int | None:
    left = address_space_left(ROOT)
    return None if left is None else max(0, left - PROCESS_RESERVE_BYTES)


def _machine_free_bytes() -> int:
    return _meminfo("MemAvailable") or _machine_bytes() // 2  # not on Linux: assume half


def _machine_bytes() -> int:
    return _meminfo("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(field: str) -> int:
    for line in read(ROOT / "proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
