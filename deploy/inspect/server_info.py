"""The bodies of `GET /server_info` (model, settings, memory) and `GET /load`. Secrets are masked."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..settings.fields import Kind, fields_of
from .caches import caches

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import PoolStatus
    from ...stages.outputs import ModelInfo
    from ..api.service import Service

HIDDEN = "***"


def server_info(engine: Engine, service: Service, version: str) -> dict[str, Any]:
    """The body of `/server_info`. Sizes are in bytes, times in seconds."""
    info, config = engine.info, service.config
    return {
        "version": version,
        "model": {
            "id": info.model_id,
            "served_names": list(service.model_names),
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "merged_adapters": list(engine.config.merge_adapter),
            "weights": None if info.weights is None else info.weights.to_json(),
            "kv_cache_dtype": info.kv_cache_dtype,
            "device": info.device,
            "model_impl": info.model_impl,
            "attention_backend": info.attention_backend,
            "is_batch_invariant": is_batch_invariant(info.attention_backend, engine.config.deterministic),
            "eos_token_ids": list(info.eos_token_ids),
            "has_chat_template": info.has_chat_template,
            "tasks": sorted(info.tasks),
            "embeddings": None if info.pooling is None else asdict(info.pooling),
        },
        "config": {
            "engine": _shown(type(engine.config), asdict(engine.config) | _resolved(info)),
            "server": _shown(type(config), asdict(config)),
        },
        "memory": None if info.memory is None else info.memory.to_json(),
        "graphs": None if info.captured is None else info.captured.to_event(),
        "startup_s": dict(info.startup_s),
        "process": {"mode": engine.mode, "engine_pid": engine.engine_pid, "engines": engine.engines},
        "blocks": _blocks(engine),
        "caches": [asdict(cache) for cache in caches(engine, service)],
    }


def is_batch_invariant(attention_backend: str, deterministic: bool) -> bool:
    """Whether the numbers of a request do not depend on the other requests of its steps.

    Otherwise kernels, or the pieces of a sum, follow the size of a step. In bfloat16 the sums then differ in their last
    bits, and another token may become the likeliest one.
    """
    return attention_backend == "triton" and deterministic


def load(engine: Engine, num_live: int) -> dict[str, Any]:
    """The body of `/load`, in sequences.

    `num_live` counts requests, including those whose body, tokens or grammar are not ready.
    """
    status = engine.status()
    admission, core = status.front.admission, status.core
    scheduler = None if core is None else core.scheduler
    return {
        "server_load": num_live,
        "waiting": admission.num_waiting if scheduler is None else scheduler.num_waiting,
        "running": 0 if scheduler is None else scheduler.num_running,
        "swapped": 0 if scheduler is None else scheduler.num_swapped,
        "kv_usage": 0.0 if core is None else round(core.cache.used_share, 6),
        "estimated_wait_s": round(admission.estimated_wait_s, 3) if admission.num_waiting else 0.0,
    }


def _resolved(info: ModelInfo) -> dict[str, Any]:
    """The values chosen at start-up for settings that were left open."""
    return {
        "model": info.model_id,
        "model_impl": info.model_impl,
        "dtype": info.dtype,
        "kv_cache_dtype": info.kv_cache_dtype or "auto",
        "device": info.device,
        "attention_backend": info.attention_backend,
        "max_model_len": info.max_model_len,
        "num_gpu_blocks": info.num_blocks,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "itl_target_ms": info.itl_target_ms,
    }


def _shown(kind: Kind, settings: dict[str, Any]) -> dict[str, Any]:
    fields = fields_of(kind)
    return {name: HIDDEN if fields[name].info.is_secret and value else value for name, value in settings.items()}


def _blocks(engine: Engine) -> dict[str, Any] | None:
    """Current KV blocks by state. Each block is free, used, cached or quarantined; `shared` is a part of `used`.

    With several kinds of memory these are the blocks of the first, and `kinds` has those of each.
    """
    if (core := engine.status().core) is None:
        return None
    cache, layout = core.cache, engine.info.kv_layout
    found: dict[str, Any] = {"block_size": engine.info.block_size} | _by_state(cache.pool)
    if cache.kinds and layout is not None:
        found["num_slabs"], found["slab_bytes"] = cache.num_slabs, layout.slab_bytes
        found["kinds"] = [
            {
                "name": kind.name,
                "window": kind.window,
                "num_layers": len(kind.layers),
                "block_bytes": kind.block_bytes,
                "blocks_per_slab": size,
                "num_slabs": use.num_slabs,
            }
            | _by_state(use.pool)
            for kind, size, use in zip(layout.kinds, layout.blocks_per_slab, cache.kinds, strict=True)
        ]
    return found


def _by_state(pool: PoolStatus) -> dict[str, int]:
    return {
        "num_blocks": pool.num_blocks,
        "free": pool.num_free,
        "used": pool.num_in_use,
        "shared": pool.num_shared,
        "cached": pool.num_cached,
        "quarantined": pool.num_quarantined,
    }
