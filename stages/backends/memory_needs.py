"""Memory needs of a loaded model, computed: the input of `cache_size.py`.

On a CPU everything but the weights is computed. On a GPU the weights and the largest step are measured. Computed there
are the tables of runner and sampler, the buffers of an asynchronous device, and an estimate of its CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from ...kernels.layout.kv_layout import KVLayout
from ...kernels.layout.sampling_rows import WIDTH
from ...kernels.layout.state_layout import StateLayout
from ...kernels.layout.step_state import STATE_WIDTH
from ...model.decoder.rope import tables_bytes
from ...model.kv_kinds import BlockBytes, CachedMixer, kv_layout
from ...model.spec import AttentionSpec, DecoderSpec, LayerSpec, RecurrentSpec
from ..config import EngineConfig
from ..errors import ConfigError
from ..memory_table import MachineMemory
from ..params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from ..sample.sampling_math import WHOLE_SIZE
from .cache_size import CPU_SHARE, CacheSizing, MemoryNeeds, free_host_share, host_limit, total_host_bytes
from .cuda.cuda_graphs import batches_of, most_rows
from .cuda.guide_uploads import GuideLayout
from .cuda.step_update import MAX_DIFF_ITEMS, diff_size

# Bytes of a logit during sampling, copies included. On a CPU, by torch's profiler, with logprobs in each row: float32
# from the model, a copy, and flags of likelier tokens, which are summed as i64.
CPU_LOGIT_BYTES = 4 + 4 + 9
SORTED_BYTES = 40 * WHOLE_SIZE  # on the host, where rows are sorted whole
GRAPH_LOGIT_BYTES = 2 + 4  # in half precision, and edited in float32
COLUMN_BYTES = 128  # per slot: the sampler's columns of one number each
# At most: kernels of a size of CUDA graphs beside its layers, with all its kinds of sampling, and bytes that the driver
# keeps for each. What it really takes is measured when the graphs are captured.
STEP_KERNELS, KERNEL_BYTES = 64, 16 << 10
RECURRENT_KERNELS = 9  # of a recurrent layer beside its products: convolution, gates, recurrence and norm
ADAPTER_KERNELS = 9  # of a layer with LoRA adapters, besides: shrink, expand, and norms apart from their products


def sizing_on_cpu(
    config: EngineConfig,
    shape: DecoderSpec,
    *,
    weights: int,
    num_positions: int,
    activations: Callable[[int], int],
    bytes_per_block: int,
    host_blocks: int = 0,
    adapters: int = 0,
    runs_kinds: bool = False,
    of_layer: BlockBytes | None = None,
    states: StateLayout | None = None,
) -> CacheSizing:
    """The `CacheSizing` of a model on a CPU.

    `weights`, `bytes_per_block` and `adapters`, the slots of LoRA adapters, are in bytes; `of_layer` is as in
    `layouts`; `states` are of recurrent layers. Called when `weights` and tables for `num_positions` positions are
    in memory, and the cache is not yet. `activations(length)` is the need in bytes of the largest step with
    sequences of up to that length. `runs_kinds`: of the decoder.
    """
    loaded = weights + tables_bytes(shape, num_positions)
    free = free_host_share(config)
    logits = config.max_num_seqs * shape.vocab_size * CPU_LOGIT_BYTES + SORTED_BYTES

    def needs_of(length: int) -> MemoryNeeds:
        return MemoryNeeds(
            weights=weights,
            state=tables_bytes(shape, length)
            + slot_bytes(config, shape, length)
            + sampler_bytes(config, shape, length),
            activations=activations(length),
            logits=logits,
            adapters=adapters,
            recurrent=0 if states is None else states.num_slots * states.state_bytes,
            snapshots=0 if states is None else states.num_snapshots * states.state_bytes,
        )

    machine = MachineMemory(
        device="cpu",
        total_bytes=total_host_bytes(),
        limit_bytes=loaded + free,
        budget_bytes=loaded + free,
        cache_cap_bytes=int(free * CPU_SHARE),
        limited_by=host_limit(),
    )
    return CacheSizing(
        config=config,
        machine=machine,
        needs_of=needs_of,
        bytes_per_block=bytes_per_block,
        host_blocks=host_blocks,
        layout_of=layouts(config, shape, bytes_per_block, runs_kinds=runs_kinds, of_layer=of_layer),
        about_masks=partial(about_masks, shape, runs_kinds=runs_kinds),
    )


def layouts(
    config: EngineConfig,
    shape: DecoderSpec,
    bytes_per_block: int,
    *,
    runs_kinds: bool,
    of_layer: BlockBytes | None = None,
) -> Callable[[int, int], KVLayout | None]:
    """`CacheSizing.layout_of` for a decoder.

    `of_layer`: bytes of one layer's block; None = its share of `bytes_per_block` by the numbers that it keeps.
    """
    has_kinds = runs_kinds and any(attention.window or attention.chunk for attention in shape.attentions)

    def share_of(mixer: CachedMixer) -> int:
        if shape.has_one_shape:
            return bytes_per_block // len(shape.kv_layers)
        assert isinstance(mixer, AttentionSpec)
        return bytes_per_block * mixer.cached_numbers // shape.cached_numbers

    def layout_of(num_bytes: int, max_model_len: int) -> KVLayout | None:
        if not has_kinds:
            return None
        layout = kv_layout(shape, config.block_size, num_bytes, of_layer or share_of, max_model_len=max_model_len)
        return layout if layout.has_windows or len(layout.kinds) > 1 else None

    return layout_of


def about_masks(shape: DecoderSpec, max_model_len: int, *, runs_kinds: bool) -> str:
    """Which layers keep keys that no query sees, and why; "" if none do, or windows free them."""
    limits, num_layers = _limits(shape, max_model_len), len(shape.kv_layers)
    if not limits or runs_kinds:
        return ""
    seen = " or ".join(str(limit) for limit in sorted(set(limits)))
    reason = "the layers of this backend share one table a sequence"
    return f"{len(limits)} of {num_layers} layers see the last {seen} tokens, and keep the others, too, as {reason}"


def _limits(shape: DecoderSpec, max_model_len: int) -> list[int]:
    """The windows of the layers whose queries do not see all keys of a sequence of `max_model_len` tokens."""
    own = [each for each in shape.attentions if each.kv_of is None]
    limits = [min(filter(None, (each.window, each.chunk)), default=max_model_len) for each in own]
    return [limit for limit in limits if limit < max_model_len]


def positions_that_fit(config: EngineConfig, shape: DecoderSpec, max_model_len: int, device: str) -> int:
    """`max_model_len`, or with `auto` what the free host memory can hold at most, before tables for it are made.

    Counts the rotary tables, and on a CPU keys and values of one sequence, of which windows keep the last. Raises
    `ConfigError` for more.
    """
    free, of_tables = free_host_share(config), max(1, 2 * tables_bytes(shape, 1))

    def needed(length: int) -> int:
        return length * of_tables + (cached_of_one(shape, length) if device == "cpu" else 0)

    most = bisect_right(range(1, free // of_tables + 1), free, key=needed)
    if max_model_len <= most:
        return max_model_len
    if config.max_model_len == "auto":
        return max(2, most)
    raise ConfigError(
        f"max_model_len = {max_model_len}: the free memory holds the tables and the cache of {most} positions at most; "
        "set max_model_len to less, or to auto"
    )


def cached_of_one(shape: DecoderSpec, length: int) -> int:
    """Numbers that the layers keep of one sequence of so many tokens, at least."""
    limits = [(min(filter(None, (each.window, each.chunk)), default=length), each) for each in shape.attentions]
    beyond = sum(max(0, length - limit) * each.cached_numbers for limit, each in limits)
    return length * shape.cached_numbers - beyond


def slot_bytes(config: EngineConfig, shape: DecoderSpec, max_model_len: int) -> int:
    """Bytes of the runner's block tables, each slot's newest token, and the pooler's sums."""
    return config.max_num_seqs * (4 * -(-max_model_len // config.block_size) + 8 + 4 * shape.hidden_size)


def sampler_bytes(config: EngineConfig, shape: DecoderSpec, max_model_len: int) -> int:
    """Bytes of the sampler's table, once every row has had tokens, a bias and stop ids."""
    row = 4 * (max_model_len + 2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS) + COLUMN_BYTES
    return config.max_num_seqs * row + shape.vocab_size


def async_bytes(config: EngineConfig, max_model_len: int) -> int:
    """Bytes of an asynchronous device: the slots' tables and state, and a step's buffers."""
    slots, rows = config.max_num_seqs, most_rows(config.max_num_seqs, config.num_verified_tokens)
    tokens = max(config.num_step_tokens, rows)
    blocks = -(-max_model_len // config.block_size)
    state = slots * 4 * (STATE_WIDTH + max_model_len + blocks)
    inputs = tokens * (3 * 8 + 4) + rows * (4 * blocks + 2 * 8 + 5 * 4) + 4
    return state + inputs + 4 * (diff_size(slots, MAX_DIFF_ITEMS, MAX_DIFF_ITEMS) + 2 * rows)


def graphs_bytes(config: EngineConfig, shape: DecoderSpec, activations: int) -> int:
    """An estimate of the bytes that CUDA graphs keep: one pool, which the largest fills, and what the driver keeps.

    The pool is a share of `activations`, the need of the largest step, plus the copies of logits during sampling. The
    driver keeps the arguments and the code of each kernel of each graph, in memory of its own.
    """
    if config.enforce_eager:
        return 0
    rows = most_rows(config.max_num_seqs, config.num_verified_tokens)
    sizes = (config.max_num_seqs, config.num_step_tokens, config.num_verified_tokens)
    batches = [batch for some in batches_of(*sizes) for batch in some]
    kernels = sum(map(layer_kernels, shape.layers)) + STEP_KERNELS
    if config.enable_lora:  # each size has two graphs of its layers
        kernels += sum(layer_kernels(layer) + ADAPTER_KERNELS for layer in shape.layers)
    kernels *= len(batches)
    share = min(1.0, max(batch.num_tokens for batch in batches) / config.num_step_tokens)
    return int(activations * share) + rows * shape.vocab_size * GRAPH_LOGIT_BYTES + kernels * KERNEL_BYTES


def layer_kernels(layer: LayerSpec) -> int:
    """Kernels of a layer in a CUDA graph, at most: where no product has a kernel with all that belongs to it.

    The library may cut each of the four products, and sum the pieces by a second kernel. Attention is its prologue and
    a list each of rows that decode and of prompts. What is normed or scaled is added by a kernel of its own.
    """
    products, activation = 4 * 2, 1
    attention = RECURRENT_KERNELS if isinstance(layer.mixer, RecurrentSpec) else 3
    norms = [layer.pre_mixer, layer.pre_feed, layer.post_mixer, layer.post_feed]
    is_scaled = layer.residual_scale != 1.0
    num_added = sum(is_scaled or norm is not None for norm in norms[2:])
    return products + attention + activation + sum(norm is not None for norm in norms) + num_added + 2 * is_scaled


def device_sampler_bytes(num_slots: int, vocab_size: int, num_rows: int) -> int:
    """Bytes of the sampling tables on a GPU: parameters, token counts, and a step's scores and guide.

    A step has at most `num_rows` rows of logits. The lists of EOS tokens are not counted.
    """
    slots = num_slots * (4 * WIDTH + 2 * vocab_size + 4 * (2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS))
    return slots + num_rows * 4 * (2 + 2 * MAX_LOGPROBS) + 4 * GuideLayout(num_rows, vocab_size).size
