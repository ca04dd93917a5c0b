"""The engine of a recording, in its first line: the settings and sizes that decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...kernels.layout.kv_layout import KVLayout
from ...kernels.layout.state_layout import StateLayout
from ..config import MAX_LORAS, MAX_SPECULATIVE_TOKENS, MAX_STEPS_IN_FLIGHT, EngineConfig
from ..outputs import ModelInfo
from ..schedule.speculation import num_speculative_tokens
from .field_values import Fields, InvalidValue, MessageFields
from .layout_fields import layout_fields, read_layout, read_states


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEngine:
    """The settings and sizes that decisions depend on."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    max_waiting: int  # prompts inside schedule
    scheduler: str
    priority_ageing_s: float | None
    itl_target_ms: float = 0.0  # 0: none
    most_drafts: int = 0  # per step; 0: no drafts
    short_length: int = 0  # as in `ModelInfo`
    max_loras: int = 0  # adapters on the device at once; 0: none
    kv_layout: KVLayout | None = None  # as in `ModelInfo`
    num_more_host_blocks: tuple[int, ...] = ()  # the same
    states: StateLayout | None = None  # the same
    pipeline_parallel_size: int = 1  # lanes of decoding rows

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo, max_waiting: int) -> RecordedEngine:
        """From an engine's configuration and sizes."""
        resolved = {
            "most_drafts": num_speculative_tokens(config, info),
            "num_blocks": info.num_blocks,
            "num_host_blocks": info.num_host_blocks,
            "block_size": info.block_size,
            "max_model_len": info.max_model_len,
            "max_waiting": max_waiting,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "itl_target_ms": info.itl_target_ms,
            "short_length": info.short_length,
            "max_loras": config.max_loras if config.enable_lora else 0,
            "kv_layout": info.kv_layout,
            "num_more_host_blocks": info.num_more_host_blocks,
            "states": info.states,
        }
        values: Fields = {name: getattr(config, name, None) for name in cls.__slots__}
        return cls(**{**values, **resolved})

    def to_fields(self) -> Fields:
        """As plain values. Of an engine with one kind of memory without those of kinds, and so with states."""
        plain_values: Fields = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        layout, num_more = plain_values.pop("kv_layout"), plain_values.pop("num_more_host_blocks")
        if layout is not None:
            plain_values |= {"kv_layout": layout_fields(layout), "num_more_host_blocks": list(num_more)}
        states = plain_values.pop("states")
        if self.pipeline_parallel_size == 1:
            del plain_values["pipeline_parallel_size"]
        if states is not None:
            plain_values["states"] = {spec.name: getattr(states, spec.name) for spec in fields(states)}
        return plain_values

    @property
    def has_kinds(self) -> bool:
        """Whether its cache has several kinds of memory."""
        return self.kv_layout is not None and len(self.kv_layout.kinds) > 1


def read_engine(values: Any) -> RecordedEngine:
    """The engine of a header. Sizes are bounded, as table sizes follow from them."""
    given = MessageFields("engine", values if isinstance(values, dict) else {})
    ageing = given.values.get("priority_ageing_s")
    engine = RecordedEngine(
        num_blocks=given.whole("num_blocks", 1, 2**24),
        num_host_blocks=given.whole("num_host_blocks", 0, 2**24),
        block_size=given.whole("block_size", 1, 2**12),
        max_model_len=given.whole("max_model_len", 2, 2**24),
        max_num_seqs=given.whole("max_num_seqs", 1, 2**16),
        max_num_batched_tokens=given.whole("max_num_batched_tokens", 1),
        steps_in_flight=given.whole("steps_in_flight", 1, MAX_STEPS_IN_FLIGHT),
        enable_chunked_prefill=given.flag("enable_chunked_prefill"),
        enable_prefix_caching=given.flag("enable_prefix_caching"),
        max_waiting=given.whole("max_waiting", 1),
        scheduler=given.text("scheduler"),
        priority_ageing_s=None if ageing is None else given.number("priority_ageing_s"),
        itl_target_ms=given.number("itl_target_ms"),
        most_drafts=given.whole("most_drafts", 0, MAX_SPECULATIVE_TOKENS),
        short_length=given.whole("short_length", 0, 2**24) if "short_length" in given.values else 0,
        max_loras=given.whole("max_loras", 0, MAX_LORAS) if "max_loras" in given.values else 0,
        kv_layout=read_layout(given.values.get("kv_layout")),
        num_more_host_blocks=tuple(given.wholes("num_more_host_blocks", 2**24)) if "kv_layout" in given.values else (),
        states=read_states(given.values["states"]) if "states" in given.values else None,
        pipeline_parallel_size=given.whole("pipeline_parallel_size", 1, MAX_STEPS_IN_FLIGHT - 1)
        if "pipeline_parallel_size" in given.values
        else 1,
    )
    if engine.max_num_seqs * engine.max_model_len > 2**28:
        sizes = f"max_num_seqs = {engine.max_num_seqs}, max_model_len = {engine.max_model_len}"
        raise InvalidValue(f"engine: {sizes}: their product must be at most {2**28}, as table sizes follow from it")
    keeps_all = engine.kv_layout is None or engine.kv_layout.kinds[0].window is None
    if keeps_all and engine.num_blocks * engine.block_size < engine.max_model_len:
        sizes = f"num_blocks = {engine.num_blocks} of {engine.block_size} tokens"
        raise InvalidValue(f"engine: {sizes} hold no sequence of max_model_len = {engine.max_model_len}")
    if engine.kv_layout is not None:
        _check_layout(engine, engine.kv_layout)
    return engine


def _check_layout(engine: RecordedEngine, layout: KVLayout) -> None:
    if (layout.num_blocks[0], layout.block_size) != (engine.num_blocks, engine.block_size):
        raise InvalidValue("engine.kv_layout: its first kind must have num_blocks blocks of block_size tokens")
    if not layout.num_at_once(engine.max_model_len):
        raise InvalidValue(f"engine.kv_layout: holds no sequence of max_model_len = {engine.max_model_len}")
    if engine.num_host_blocks and len(engine.num_more_host_blocks) != len(layout.kinds) - 1:
        raise InvalidValue("engine.num_more_host_blocks: must have a number for each kind after the first")
