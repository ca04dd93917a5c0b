"""Parts of an engine's start that read its settings, and the log line when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault, parse_fault
from ...runtime.pipeline import Health
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ..adapters.gate import AdapterGate
from ..adapters.registry import parse_modules
from ..config import EngineConfig
from ..errors import ConfigError, Refused
from ..outputs import ModelInfo
from ..sample.logits_processor import LogitsProcessor
from ..sample.processor_chain import check_processors, load_processors
from .core import EngineSetup
from .engine_status import EngineStatus

if TYPE_CHECKING:
    from ..loading.early import EarlyLoading

log = get_logger("millrace.stages")

Processors = LogitsProcessor | Sequence[LogitsProcessor | str] | None


def make_setup(
    config: EngineConfig, env: Env, health: Callable[[], Health], given: Processors, opening: EarlyLoading | None
) -> EngineSetup:
    """What an engine was asked for, with the logits processors of the settings and of the caller.

    Raises `ConfigError` for processors that cannot be, and an `opening` with other settings.
    """
    made, named = _processors(given)
    if named:
        config = replace(config, logits_processor=(*config.logits_processor, *named))
    processors = [*load_processors(config.logits_processor), *made]
    check_processors(processors)
    if opening is not None and opening.config != config:
        raise ConfigError("opening: must have the same settings as the engine")
    if any(one.always for one in processors):  # it must see each token before the next one is chosen
        config = replace(config, speculation="off")
    progress = LoadProgress(env.now) if opening is None else opening.phases.progress
    return EngineSetup(config, env, progress, health, processors, made, opening)


def _processors(given: Processors) -> tuple[list[LogitsProcessor], list[str]]:
    """The processors that a caller made, and those that it names."""
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [one for one in listed if not isinstance(one, str)], [one for one in listed if isinstance(one, str)]


def configured_faults(config: EngineConfig, stages: Sequence[str]) -> list[Fault]:
    """The configured fault injections. Raises `ConfigError` for one in none of these stages."""
    faults = [parse_fault(text) for text in config.inject]
    for fault in faults:
        if fault.stage not in stages:
            raise ConfigError(f"inject = {fault.stage}: must name a stage, one of {', '.join(stages)}")
        log.warning("fault.injected", stage=fault.stage, kind=fault.kind, rate=fault.rate, delay_s=fault.delay_s)
    return faults


async def load_modules(config: EngineConfig, env: Env, adapters: AdapterGate) -> None:
    """Loads the adapters of the settings. Raises `ConfigError` for the first that cannot be."""
    for name, path in parse_modules(config.lora_modules).items():
        try:
            await adapters.load(env, name, path)
            if adapters.has_room_to_pin():
                await adapters.pin(env, name, "host")
        except Refused as error:
            raise ConfigError(f"lora_modules: {error.message}") from None


def log_ready(info: ModelInfo, status: EngineStatus, phases: Phases) -> None:
    """Logs what serves from now on, and how long each phase of the start took."""
    seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
    log.info(
        "engine.ready",
        model=info.model_id,
        model_impl=info.model_impl,
        attention_backend=info.attention_backend,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        kv_cache_dtype=info.kv_cache_dtype,
        weights_bytes=None if info.memory is None else info.memory.row("weights").num_bytes,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        num_speculative_tokens=0 if status.core is None else status.core.scheduler.drafts.num_tokens,
        **seconds,
    )
