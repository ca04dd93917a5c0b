"""A rank's share of a model: its weights, and the parts of a decoder that computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ....kernels import kernel_set
from ....model.decoder.adapted_kernels import with_slots
from ....model.decoder.lora_linear import LoraTable, with_adapters
from ....model.decoder.lora_slots import LoraSlots
from ....model.decoder.weights import DecoderWeights, load_weights
from ....model.sharding.layer_split import LayerRange, spec_of_layers
from ....model.sharding.shard import RankShare, spec_of
from ....model.spec import DecoderSpec
from ....runtime.startup.load_progress import LoadProgress
from ...config import EngineConfig
from ..merged_adapters import merging_of
from .fitted_runner import free_bytes, most_rows_of

Parts = tuple[DecoderWeights, kernel_set.KernelSet]


def load_share(
    config: EngineConfig,
    root: Path,
    whole: DecoderSpec,
    shard: RankShare,
    device: torch.device,
    kernels: kernel_set.KernelSet,
    progress: LoadProgress | None = None,
    layers: LayerRange | None = None,
) -> tuple[DecoderSpec, Parts, dict[str, Any]]:
    """(spec, positional arguments behind it, keyword arguments) of the rank's `Decoder`. `whole` is of all ranks.

    `layers`: those of the rank; None: all.
    """
    weights = load_weights(
        root,
        whole,
        device,
        getattr(torch, config.dtype_of(whole.dtype)),
        load_format=config.load_format,
        progress=progress,
        is_batch_invariant=config.deterministic,
        stacks_experts=kernels.name == "triton",
        free_bytes=free_bytes(config, device) // (shard.size if device.type == "cpu" else 1),  # ranks share the host's
        change=merging_of(config),
        shard=shard if shard.size > 1 else None,
        layers=layers,
    )
    spec = whole if shard.size == 1 else spec_of(whole, shard)
    spec = spec if layers is None else spec_of_layers(spec, layers)
    return spec, *with_adapter_places(config, spec, weights, kernels, is_async=False)


def with_adapter_places(
    config: EngineConfig,
    spec: DecoderSpec,
    weights: DecoderWeights,
    kernels: kernel_set.KernelSet,
    *,
    is_async: bool,
) -> tuple[Parts, dict[str, Any]]:
    """The weights and kernels of a decoder, with places for adapters if there are any, and its keyword arguments."""
    options: dict[str, Any] = {"is_batch_invariant": config.deterministic}
    if not config.enable_lora:
        return (weights, kernels), options
    if is_async or kernels.name == "triton":  # adapters lie at fixed addresses, as CUDA graphs need
        sizes = (config.max_loras, config.max_lora_rank, max(config.num_step_tokens, most_rows_of(config)))
        slots = LoraSlots(spec, weights, kernel_set.load_lora(kernels.name), *sizes)
        return (weights, with_slots(kernels, slots)), options | {"adapters": slots}
    table = LoraTable(config.max_loras, weights.embedding.device)  # each step groups its tokens on the host
    return (with_adapters(weights, table), kernels), options | {"adapters": table}
