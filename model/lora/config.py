"""adapter_config.json of a LoRA adapter, key by key: what is read, what changes nothing, what is refused.

A key that is not listed here is refused unless it is off: it may change what the adapter computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import AdapterError, CheckpointError, quoted, shown
from ..files import read_json

CONFIG = "adapter_config.json"
MOST_PATTERN_CHARS = 1000
MOST_PATTERNS = 1000  # of a key
MAX_RANK = 4096  # largest that is read; that of a matrix of 4,096 columns
READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "base_model_name_or_path", "revision", "task_type", "peft_type", "init_lora_weights", "bias", "use_dora",
    "lora_bias", "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "ensure_weight_tying",
    "layers_to_transform",
}  # fmt: skip
# They act in training only, or describe the file
HARMLESS = {
    "lora_dropout", "eva_config", "megatron_config", "megatron_core", "peft_version", "inference_mode", "auto_mapping",
    "loftq_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "layers_pattern",
}  # fmt: skip
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")  # and true or false; others change the base's weights too
# Keys of kinds that are not served -> what they do, for the message
OTHER_KINDS = {
    "alora_invocation_tokens": "the adapter begins at these tokens only",
    "target_parameters": "it changes parameters that are not those of linear layers",
    "layer_replication": "it adds layers to the model",
    "use_qalora": "its inputs are averaged in groups",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "it mixes several adapters",
    "kasa_config": "it changes the base's weights as well",
    "velora_config": "it is another kind of adapter",
    "monteclora_config": "it draws at random",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter_config.json says of the computation."""

    name: str  # of the adapter, for errors
    parent: str | None  # the model that it was made for
    rank: int
    alpha: float
    is_rslora: bool  # the scale is alpha / sqrt(rank) instead of alpha / rank
    rank_pattern: Mapping[str, int]  # pattern of module names -> rank; the first that matches holds
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None  # a regular expression, "all-linear" or names
    exclude_modules: str | tuple[str, ...] | None  # as target_modules
    layers_to_transform: tuple[int, ...]  # empty: all
    bias: str  # none, all or lora_only: biases of the base that were trained
    use_dora: bool
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    trained_tokens: Mapping[str, tuple[int, ...]]  # end of an embedding's path ("": the input's) -> rows it replaces
    is_transposed: bool  # of layers that store [columns, rows] (`fan_in_fan_out`)
    is_tied: bool  # embedding and head share what was trained (`ensure_weight_tying`)

    def fail(self, problem: str) -> NoReturn:
        raise AdapterError(f"adapter {quoted(self.name)}: {problem}")

    def scale(self, rank: int, alpha: float) -> float:
        """What multiplies B A."""
        return alpha / math.sqrt(rank) if self.is_rslora else alpha / rank

    def refuse_at_run_time(self) -> None:
        """Raises AdapterError for what is served merged only."""
        merge = "merge it with --merge-adapter"
        for key, is_on in (("use_dora", self.use_dora), ("lora_bias", self.lora_bias)):
            if is_on:
                self.fail(f"{key} is not served at run time; {merge}")
        if self.modules_to_save:
            what = f"modules_to_save holds {shown(', '.join(self.modules_to_save))}"
            self.fail(f"{what}; run-time adapters change linear layers only; {merge}")
        if self.trained_tokens:
            self.fail(f"trainable_token_indices: run-time adapters change linear layers only; {merge}")
        if self.bias != "none":
            self.fail(f"bias = {self.bias}: run-time adapters change no biases; {merge}")


def read_config(root: Path, name: str) -> AdapterConfig:
    """The configuration of the adapter in `root`. Raises AdapterError naming the adapter, the key and the value."""
    try:
        values = read_json(root, CONFIG)
    except CheckpointError as error:
        raise AdapterError(f"adapter {quoted(name)}: {error}") from None
    if values is None:
        raise AdapterError(f"adapter {quoted(name)}: {root} holds no {CONFIG}, so it is no adapter in PEFT's format")
    return parse_config(values, name)


def parse_config(values: Mapping[str, Any], name: str) -> AdapterConfig:
    """As `read_config`, from the contents of the file."""
    keys = _Keys(values, name)
    keys.refuse_other_kinds()
    return AdapterConfig(
        name=name,
        parent=keys.text("base_model_name_or_path"),
        rank=keys.rank("r", values.get("r", 8)),
        alpha=keys.alpha("lora_alpha", values.get("lora_alpha", 8)),
        is_rslora=keys.flag("use_rslora"),
        rank_pattern={key: keys.rank("rank_pattern", value) for key, value in keys.patterns("rank_pattern")},
        alpha_pattern={key: keys.alpha("alpha_pattern", value) for key, value in keys.patterns("alpha_pattern")},
        target_modules=keys.modules("target_modules"),
        exclude_modules=keys.modules("exclude_modules"),
        layers_to_transform=keys.layers(),
        bias=keys.bias(),
        use_dora=keys.flag("use_dora"),
        lora_bias=keys.flag("lora_bias"),
        modules_to_save=keys.names("modules_to_save"),
        trained_tokens=keys.tokens(),
        is_transposed=keys.flag("fan_in_fan_out"),
        is_tied=keys.flag("ensure_weight_tying"),
    )


def is_on(value: object) -> bool:
    """Whether the value of a key asks for something: not null, false, "" or an empty list or object."""
    return value is not None and value is not False and value not in ("", [], {})


class _Keys:
    """Typed access to the keys; errors name the adapter, the key and the value."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def fail(self, problem: str) -> NoReturn:
        raise AdapterError(f"adapter {quoted(self.name)}: {problem}")

    def refuse_other_kinds(self) -> None:
        """Refuses what is not plain LoRA or one of the kinds that are merged, and keys that are not known."""
        kind, task, start = (self.values.get(key) for key in ("peft_type", "task_type", "init_lora_weights"))
        if kind != "LORA":
            self.fail(f"peft_type = {quoted(kind)} is not served; LORA is")
        if task not in (None, "CAUSAL_LM"):
            self.fail(f"task_type = {quoted(task)}: it has an output of its own; CAUSAL_LM is served")
        if start is not None and not isinstance(start, bool) and start not in PLAIN_STARTS:
            self.fail(
                f"init_lora_weights = {quoted(start)} changed the base's weights as well; save it converted, as "
                "plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)"
            )
        for key, what in OTHER_KINDS.items():
            if is_on(self.values.get(key)):
                self.fail(f"{key} is not served: {what}")
        for key, value in self.values.items():
            if key not in READ and key not in HARMLESS and key not in OTHER_KINDS and is_on(value):
                known = f"config key {quoted(key)} is not known to this server"
                self.fail(f"{known}; it may change what the adapter computes")

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{key} = {quoted(value)}: must be true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(f"{key} = {quoted(value)}: must be a text")
        return shown(value) if value else None

    def rank(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            self.fail(f"{key} = {quoted(value)}: must be a whole number from 1 to {MAX_RANK}")
        return value

    def alpha(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
            self.fail(f"{key} = {quoted(value)}: must be a number of at most a million")
        return float(value)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.fail(f"{key} = {quoted(value)}: must be a list of names")
        return tuple(value)

    def modules(self, key: str) -> str | tuple[str, ...] | None:
        value = self.values.get(key)
        if not isinstance(value, str):
            return None if value is None else self.names(key)
        self._check_length(key, value)
        return value

    def layers(self) -> tuple[int, ...]:
        value = self.values.get("layers_to_transform")
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in listed):
            self.fail(f"layers_to_transform = {quoted(value)}: must be the number of a layer or a list of them")
        return tuple(listed)

    def tokens(self) -> dict[str, tuple[int, ...]]:
        key = "trainable_token_indices"
        value = self.values.get(key)
        by_name: dict[str, Any] = value if isinstance(value, dict) else {"": value} if is_on(value) else {}
        for ids in by_name.values():
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids) or len({*ids}) != len(ids):
                self.fail(f"{key} = {quoted(value)}: must list token ids, each once")
        return {name: tuple(ids) for name, ids in by_name.items()}

    def bias(self) -> str:
        value = self.values.get("bias") or "none"
        if value not in ("none", "all", "lora_only"):
            self.fail(f"bias = {quoted(value)}: must be none, all or lora_only")
        return str(value)

    def patterns(self, key: str) -> Sequence[tuple[str, Any]]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            self.fail(f"{key} = {quoted(value)}: must map patterns of names to numbers")
        if len(value) > MOST_PATTERNS:
            self.fail(f"{key}: holds {len(value)} patterns; at most {MOST_PATTERNS} are read")
        for pattern in value:
            self._check_length(key, pattern)
        return list(value.items())

    def _check_length(self, key: str, pattern: str) -> None:
        if len(pattern) > MOST_PATTERN_CHARS:
            self.fail(f"{key}: a pattern of {len(pattern)} characters; at most {MOST_PATTERN_CHARS} are read")
