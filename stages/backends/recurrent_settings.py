"""What recurrent layers do not go with, and how many sequences their states leave room for. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.layout.state_layout import StateLayout
from ...model.spec import DecoderSpec
from ...runtime.env.log import get_logger
from ..config import EngineConfig
from ..errors import ConfigError
from ..memory_table import human
from .cache_size import CPU_SHARE, free_host_share

STATE_SHARE = {"cpu": CPU_SHARE / 2, "cuda": 0.25}  # of free memory, at most, for the states of running sequences
SNAPSHOT_SHARE = 0.2  # of the memory for the cache, for states of cached prefixes
log = get_logger("millrace.stages")


def check_recurrent(config: EngineConfig, shape: DecoderSpec) -> None:
    """Raises `ConfigError` for a setting that a model with recurrent layers does not support."""
    if not shape.recurrent_layers:
        return
    kinds = ", ".join(dict.fromkeys(layer.kind for layer in shape.recurrent_layers.values()))
    unsupported = {
        "speculation = ngram": (config.speculation == "ngram", "off"),
        "enable_lora = True": (config.enable_lora, "False"),
        "kv_cache_dtype = fp8": (config.kv_cache_dtype == "fp8", "auto"),
        f"merge_adapter = {', '.join(config.merge_adapter)}": (bool(config.merge_adapter), "none"),
    }
    for setting, (is_set, instead) in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting}: is not supported for model = {config.model}, a {shape.family} with recurrent layers "
                f"({kinds} in {len(shape.recurrent_layers)} of {shape.num_layers}); use {instead}"
            )


def within_state_memory(
    config: EngineConfig, shape: DecoderSpec, item_size: int, free_bytes: int, device: str = "cpu"
) -> EngineConfig:
    """`config` with as many sequences at once as their recurrent states leave room for.

    `item_size`: bytes of a number of the model; `free_bytes`: memory of the `device`, cpu or cuda, that the weights
    leave. Raises `ConfigError` if not one sequence fits.
    """
    each = shape.state_bytes(item_size)
    if not each:
        return config
    share = STATE_SHARE[device]
    available = int(free_bytes * share)
    most, asked = available // each, config.max_num_seqs
    if most < 1:
        raise ConfigError(
            f"{shape.family}: the recurrent state of a sequence takes {human(each)}, and {human(available)} are for "
            f"it, {share:.1%} of the memory that is free beside the weights: free memory, or choose a smaller "
            "model"
        )
    if most >= asked:
        return config
    total = f"{most} x {human(each)} = {human(most * each)} of {human(available)}"
    needs = f"{asked} need {human(asked * each)}"
    log.warning("max_num_seqs.lowered", asked=asked, used=most, state=f"{total}; {needs}")
    return replace(config, max_num_seqs=most)


def num_snapshots(
    config: EngineConfig,
    state_bytes: int,
    block_bytes: int,
    free_bytes: int,
    max_model_len: int,
    cache_share: float = CPU_SHARE,
) -> int:
    """How many states of cached prefixes are kept: as many as `state_cache_bytes` holds, or a fifth of the cache.

    At most one for each block of all sequences that run at once. `free_bytes`: memory beside what is in use, of which
    the cache takes `cache_share` if its size is not set.
    """
    if not config.enable_prefix_caching:
        return 0
    num_blocks = -(-max_model_len // config.block_size) * config.max_num_seqs
    if config.num_gpu_blocks is not None:
        num_blocks = config.num_gpu_blocks
        cache_bytes = num_blocks * block_bytes
    else:
        cache_bytes = int(free_bytes * cache_share) if config.kv_cache_bytes is None else config.kv_cache_bytes
    share = int(cache_bytes * SNAPSHOT_SHARE) if config.state_cache_bytes is None else config.state_cache_bytes
    return min(num_blocks, share // state_bytes)


def state_layout(
    config: EngineConfig,
    shape: DecoderSpec,
    item_size: int,
    block_bytes: int,
    host_blocks: int,
    max_model_len: int,
    device_bytes: int | None = None,
) -> tuple[StateLayout | None, int]:
    """How many recurrent states there is memory for, and how many blocks are left of the host pool of `host_blocks`.

    `item_size`: bytes of a number of the model; `block_bytes`: of a block; `device_bytes`: of a GPU, what states and
    the cache may take. None: the model has no recurrent layers.
    """
    each = shape.state_bytes(item_size)
    if not each:
        return None, host_blocks
    free, share = free_host_share(config), CPU_SHARE
    if device_bytes is not None:
        free, share = max(0, device_bytes - config.max_num_seqs * each), 1.0
    snapshots = num_snapshots(config, each, block_bytes, free, max_model_len, share)
    layout = StateLayout(each, config.max_num_seqs, num_snapshots=snapshots)
    layout, left = layout.with_host(host_blocks * block_bytes, block_bytes)
    if host_blocks and not left:
        log.info("swap.off", reason=f"{shape.family}: the pool for swapped sequences is too small for a state")
    return layout, left
