"""The engine's configuration: its settings, and the checks of their values that need no model.

A configuration is read and checked once, at start, and then passed in. The settings are in `engine_settings.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..model.checkpoint.load_formats import load_format_problem
from ..runtime.env.writable import file_problem
from ..runtime.fault_injection import parse_fault
from .engine_settings import EngineSettings
from .errors import ConfigError
from .params import MAX_LOGPROBS
from .plugins import parse_plugins

MAX_SPECULATIVE_TOKENS = 64
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[A-Za-z0-9_][\w.-]{0,127})?", re.ASCII)
MAX_STEPS_IN_FLIGHT = 16  # steps
MAX_LORAS = 1024  # adapters on the device at once


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The settings of an engine, checked, and what follows from them."""

    @property
    def num_host_loras(self) -> int:
        """`max_cpu_loras`, or its default."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def dtype_of(self, own: str) -> str:
        """The dtype of the weights in memory; `own` is the checkpoint's dtype."""
        return {"auto": own, "half": "float16"}.get(self.dtype, self.dtype)

    @property
    def quantized_to(self) -> Literal["int8", "int4"] | None:
        """What the weights are quantized to while loading; None: they are not."""
        return self.quantization if self.quantization in ("int8", "int4") else None

    @property
    def gpu(self) -> int | None:
        """The index of the GPU that `device` names; None if it names none."""
        return None if self.device in ("auto", "cpu") else int(self.device.removeprefix("cuda").lstrip(":") or 0)

    def for_whole_answers(self) -> EngineConfig:
        """The configuration for callers that read only complete answers.

        It has no step-time target unless one is set.
        """
        return self if self.itl_target_ms is not None else replace(self, itl_target_ms=0.0)

    @property
    def num_step_tokens(self) -> int:
        """`max_num_batched_tokens`, after `resolve_step_size` has set it."""
        assert self.max_num_batched_tokens is not None, "settle_step_size() must run first"
        return self.max_num_batched_tokens

    @property
    def num_ranks(self) -> int:
        """Processes over which one engine computes the model, itself included."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_verified_tokens(self) -> int:
        """Tokens of the largest step with drafts on a GPU, where `auto` has none."""
        return 1 + self.num_speculative_tokens if self.speculation == "ngram" else 0

    def check_files(self) -> None:
        """`ConfigError` if the model's file is missing, or the recording cannot be written.

        Called before the model is loaded, and before a server takes its port.
        """
        if self.model is not None and _is_missing(self.model):
            from ..model.similar_models import similar_model

            near = similar_model(self.model)
            raise ConfigError(f"model = {self.model}: there is no such file or folder{near}; check the path")
        if self.record is not None and (problem := file_problem(Path(self.record))) is not None:
            raise ConfigError(f"record = {self.record}: {problem}")

    def __post_init__(self) -> None:
        adapters: object = self.merge_adapter
        if isinstance(adapters, str):
            object.__setattr__(self, "merge_adapter", (adapters,))
        for text in self.merge_adapter:
            parse_merge(text)
        for name in ("override_generation_config", "default_chat_template_kwargs"):
            given: object = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, json.dumps(given))
            json_object(name, getattr(self, name))
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs = {self.max_logprobs}: must be from 0 to {MAX_LOGPROBS}")
        parse_plugins("stage", self.stage)
        parse_plugins("logits_processor", self.logits_processor, has_place=False)
        for text in self.inject:
            try:
                parse_fault(text)
            except ValueError as error:
                raise ConfigError(f"inject: {error}") from None
        if problem := load_format_problem(self.load_format):
            raise ConfigError(f"load_format = {self.load_format}: {problem}")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise ConfigError(
                f"device = {self.device}: must be auto, cpu, cuda, or one of several GPUs, such as cuda:1"
            )
        _power_of_two("block_size", self.block_size)
        if self.pipeline_parallel_size != 1:
            self._check_pipeline()
        if self.emulate_tp != 1 and self.tensor_parallel_size != 1:
            raise ConfigError(f"emulate_tp = {self.emulate_tp}: it is for one process; leave out tensor_parallel_size")
        for name in (
            "max_num_seqs",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "emulate_tp",
            "tokenizer_workers",
            "data_parallel_size",
            "max_admitted_requests",
            "max_unread_tokens",
            "num_speculative_tokens",
            "prompt_lookup_min",
            "max_loras",
            "max_lora_rank",
        ):
            _positive(name, getattr(self, name))
        self._check_adapters()
        if not self.ray_timeout_s > 0:
            raise ConfigError(f"ray_timeout_s = {self.ray_timeout_s}: must be above 0 seconds")
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not (name == "max_model_len" and value == "auto"):
                _positive(name, value)
        if self.state_cache_bytes is not None and self.state_cache_bytes < 0:
            raise ConfigError(
                f"state_cache_bytes = {self.state_cache_bytes}: must be at least 0, which caches no prefix of a model "
                "with recurrent layers"
            )
        if self.num_cpu_blocks is not None and self.num_cpu_blocks < 0:
            raise ConfigError(
                f"num_cpu_blocks = {self.num_cpu_blocks}: must be at least 0, which switches swapping off"
            )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            setting = f"num_speculative_tokens = {self.num_speculative_tokens}"
            raise ConfigError(f"{setting}: must be at most {MAX_SPECULATIVE_TOKENS}; speculation = off has none")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            setting = f"prompt_lookup_max = {self.prompt_lookup_max}"
            raise ConfigError(f"{setting}: must be at least prompt_lookup_min, which is {self.prompt_lookup_min}")
        for name in ("priority_ageing_s", "max_parked_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{name} = {seconds}: must be a number of seconds above 0")
        if self.swap_space is not None and not 0.0 <= self.swap_space < float("inf"):
            raise ConfigError(f"swap_space = {self.swap_space}: must be a number of GiB, 0 or more")
        if not 1 <= self.steps_in_flight <= MAX_STEPS_IN_FLIGHT:
            setting = f"steps_in_flight = {self.steps_in_flight}"
            raise ConfigError(f"{setting}: must be 1 (serial) to {MAX_STEPS_IN_FLIGHT}; 2 overlaps")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization = {self.gpu_memory_utilization}: must be above 0 and at most 1")
        if self.itl_target_ms is not None and not 0.0 <= self.itl_target_ms < float("inf"):
            raise ConfigError(f"itl_target_ms = {self.itl_target_ms}: must be a number of milliseconds, or 0 for none")
        if self.itl_target_ms and not self.enable_chunked_prefill:
            raise ConfigError(
                f"itl_target_ms = {self.itl_target_ms:g}: steps keep to it by computing prompts in parts; "
                "enable_chunked_prefill, or set it to 0"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is below max_num_seqs = {self.max_num_seqs}: "
                "a step could not even give each running sequence one token; raise the first or lower the second"
            )

    def _check_pipeline(self) -> None:
        """Checks `pipeline_parallel_size`, and raises `steps_in_flight` to one for each rank and one that waits."""
        size = self.pipeline_parallel_size
        _positive("pipeline_parallel_size", size)
        if size >= MAX_STEPS_IN_FLIGHT:
            raise ConfigError(f"pipeline_parallel_size = {size}: must be at most {MAX_STEPS_IN_FLIGHT - 1}")
        if self.emulate_tp != 1:
            setting = f"pipeline_parallel_size = {size} with emulate_tp = {self.emulate_tp}"
            raise ConfigError(f"{setting}: it is for one process; leave out one of the two")
        object.__setattr__(self, "steps_in_flight", max(self.steps_in_flight, size + 1))

    def _check_adapters(self) -> None:
        if self.max_loras > MAX_LORAS:
            raise ConfigError(f"max_loras = {self.max_loras}: must be at most {MAX_LORAS}")
        if self.num_host_loras <= self.max_loras:
            raise ConfigError(
                f"max_cpu_loras = {self.max_cpu_loras}: must be above max_loras, which is {self.max_loras}, as "
                "those on the device stay on the host and one more is read beside them"
            )
        if self.lora_host_bytes is not None and self.lora_host_bytes < 1:
            raise ConfigError(
                f"lora_host_bytes = {self.lora_host_bytes}: must be at least 1; leave it out for no limit"
            )
        for text in self.lora_hub_allow:
            if not HUB_NAME.fullmatch(text) or ".." in text:
                message = f"lora_hub_allow = {text}: must be OWNER/NAME of the Hub, or OWNER/NAME@REVISION without /"
                raise ConfigError(message)
        ids = [text.partition("@")[0] for text in self.lora_hub_allow]
        if twice := [each for each in ids if ids.count(each) > 1]:
            raise ConfigError(f"lora_hub_allow: {twice[0]} is named twice; allow one revision of it")
        if self.lora_chat_templates and not self.enable_lora:
            raise ConfigError("lora_chat_templates: adapters are served with enable_lora only; set it too")
        if not self.enable_lora and (self.lora_modules or self.lora_dir or self.lora_hub_allow):
            name = "lora_modules" if self.lora_modules else "lora_dir" if self.lora_dir else "lora_hub_allow"
            raise ConfigError(f"{name}: adapters are served with enable_lora only; set it too")


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """The JSON object in the setting `name`; an empty one for None. Raises `ConfigError`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'{name} = {text}: must be a JSON object, as {{"temperature": 0.2}} in quotes of the shell')
    return value


def parse_merge(text: str) -> tuple[str, float]:
    """The folder or Hub id and the scale of a `merge_adapter`: PATH, or PATH=scale. Raises `ConfigError`."""
    path, equals, number = text.rpartition("=")
    try:
        scale = float(number) if equals else 1.0
    except ValueError:  # a path with an equals sign in it
        return text, 1.0
    if not (path or not equals) or not abs(scale) <= 1e6:
        raise ConfigError(f"merge_adapter = {text}: must be a folder or Hub id, or one with a number, as folder=0.5")
    return (path, scale) if equals else (text, 1.0)


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")


def _is_missing(model: str) -> bool:
    """Whether `model` is a path, not a Hub id, and leads nowhere. Behind a colon may be a part of a file's name."""
    paths = [os.path.expanduser(text) for text in (model, model.rpartition(":")[0]) if text]  # an unknown ~user stays
    is_path = model.startswith(("/", "./", "../", "~")) or (model.endswith(".gguf") and "/" not in model)
    return is_path and not any(os.path.exists(path) for path in paths)


def _power_of_two(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ConfigError(f"{name} = {value}: must be a power of two, as the kernels load whole blocks; try 16 or 32")


def not_for_encoders(config: EngineConfig) -> ConfigError:
    """The error for an encoder model whose settings ask for engine processes."""
    count = config.data_parallel_size
    setting = "mode = split: must be inline" if count == 1 else f"data_parallel_size = {count}: must be 1"
    return ConfigError(f"{setting} for an encoder model, which generates nothing")


NATIVE_TOKENS, OTHER_TOKENS = 512, 2048  # default upper bound per step: native, otherwise


def resolve_step_size(config: EngineConfig, *, is_native: bool) -> EngineConfig:
    """`config` with max_num_batched_tokens and itl_target_ms set where they are None.

    With the native library and chunked prefill, itl_target_ms stays None until it is measured (`target_ms_for`).
    Without, it becomes 0: no target.
    """
    is_cut = is_native and config.enable_chunked_prefill
    most, target_ms = config.max_num_batched_tokens, config.itl_target_ms
    if most is None:
        most = max(NATIVE_TOKENS if is_cut else OTHER_TOKENS, config.max_num_seqs)
    if target_ms is None and not is_cut:
        target_ms = 0.0
    return replace(config, max_num_batched_tokens=most, itl_target_ms=target_ms)
