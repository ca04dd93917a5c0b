"""Reads a checkpoint of a type that transformers knows: its configuration, and its model with all weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, __version__
from transformers.utils import logging

from ..checkpoint.safetensors import Checkpoint
from ..errors import CheckpointError, quoted, shown
from ..files import read_json, refuse_code
from ..foreign import MXFP4, describe_folder, refuse_quantized
from ..spec import DecoderSpec, HeadSpec
from .attention_interface import IMPLEMENTATION
from .errors import UnservableError
from .gate import auto_class

LARGEST = {  # values of keys
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"): 1024,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_attention_heads"): 1 << 16,
    ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"): 1 << 24,
}
OTHER_HEADS = ("Classification", "ForQuestionAnswering", "ForMaskedLM", "ForMultipleChoice", "ForPreTraining")
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # of weights whose config.json names none; others: float32


def read_config(root: Path) -> PreTrainedConfig:
    """transformers' configuration of the checkpoint in `root`. Raises CheckpointError, naming what is wrong."""
    values = read_json(root, "config.json")
    if values is None:
        nothing = f"{root}: no config.json, so this is not a model directory in Hugging Face format"
        raise CheckpointError(describe_folder(root) or nothing)
    refuse_code(root, "config.json", values)
    refuse_quantized(root, values)
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json ({root}): model_type: {quoted(model_type)} is known neither here nor to transformers "
            f"{__version__}"
        )
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json ({root}): architectures: must be a list of names, not {quoted(names)}")
    for name in names:
        if str(name).endswith(OTHER_HEADS):
            raise CheckpointError(f"config.json ({root}): architectures: {shown(str(name))} does not generate text")
    _check_sizes(root, values)
    try:
        config = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type, after the key that led to it
        raise CheckpointError(f"config.json ({root}): {_first_line(error)}") from None
    assert isinstance(config, PreTrainedConfig)
    if is_mxfp4(config):
        config.quantization_config["dequantize"] = True  # as products of codes need kernels that are downloaded
    return config


def is_mxfp4(config: PreTrainedConfig) -> bool:
    """Whether the experts are stored in 4-bit floats, which transformers unpacks while loading."""
    found = getattr(config, "quantization_config", None)
    return isinstance(found, dict) and found.get("quant_method") == MXFP4


def read_spec(config: PreTrainedConfig, root: Path, load_format: str = "auto") -> DecoderSpec:
    """What the text stages need to know before the model is made: a spec without layers.

    Raises UnservableError for a model that cannot be served, as far as that is known without its weights.
    """
    auto_class(config)
    text = config.get_text_config(decoder=True)
    vocab_size, hidden_size = (getattr(text, key, None) for key in ("vocab_size", "hidden_size"))
    if not isinstance(vocab_size, int) or not isinstance(hidden_size, int):
        raise UnservableError("its configuration names no vocab_size and hidden_size")
    ends, begin = (_ids(config, text, key, vocab_size) for key in ("eos_token_id", "bos_token_id"))
    return DecoderSpec(
        family=config.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(),
        head=HeadSpec(is_tied=bool(getattr(text, "tie_word_embeddings", False))),
        ropes=(),
        max_position_embeddings=longest_sequence(text),
        dtype=_dtype(config, root, load_format),
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=ends,
    )


def _ids(config: PreTrainedConfig, text: PreTrainedConfig, key: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of a key of the whole model, or else of its text half. Those that no token has are left out."""
    value = getattr(config, key, None)
    if value is None:
        value = getattr(text, key, None)
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < vocab_size))


def longest_sequence(text: PreTrainedConfig) -> int:
    """The longest sequence whose tokens are those that transformers generates, whatever runs beside it."""
    names = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
    longest = next((int(size) for name in names if isinstance(size := getattr(text, name, None), int)), None)
    if longest is None:
        raise UnservableError("its configuration names no longest sequence (max_position_embeddings)")
    for kind, values in _rope_scalings(text):
        if kind == "longrope":  # beyond this length, frequencies follow the longest sequence of a batch
            longest = min(longest, values.get("original_max_position_embeddings") or longest)
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        # NOTE: Llama 4 scales queries by a token's row in the step, which equals its position for whole prompts only.
        # Below this position the scale is 1.
        longest = min(longest, int(text.floor_scale) - 1)
    return longest


def _rope_scalings(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """The kind and the values of each rotary scaling: one, or one for each type of layer."""
    values = getattr(config, "rope_parameters", None)
    if not isinstance(values, dict):
        return []
    each = [values] if "rope_type" in values else [value for value in values.values() if isinstance(value, dict)]
    return [(str(value.get("rope_type", "default")), value) for value in each]


def num_weights(root: Path, config: PreTrainedConfig, load_format: str) -> int:
    """Numbers of all weights that the configuration describes; makes the model without memory for them.

    Raises CheckpointError if they are far more than the files hold, which would otherwise be filled with noise.
    """
    kind = auto_class(config)
    with torch.device("meta"):
        described = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if load_format != "dummy":
        checkpoint = Checkpoint(root)  # checks the headers, and refuses pickles
        packed = "_blocks" if is_mxfp4(config) else "\0"  # the end of names of tensors with two numbers in a byte
        stored = sum(math.prod(checkpoint.shape(name)) * (1 + name.endswith(packed)) for name in checkpoint.names)
        if described > 2 * stored:  # an output layer that is the embedding counts once or twice
            raise CheckpointError(
                f"config.json ({root}): describes {described} weights, and the files hold {stored}; they are of "
                "different models"
            )
    return int(described)


def load_model(
    root: Path, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, load_format: str, seed: int = 0
) -> PreTrainedModel:
    """The model with its weights, or with random ones for load_format "dummy"; its attention is that of this room.

    Raises UnservableError for a model that does not fit, and CheckpointError for files that are not those of one.
    """
    kind = auto_class(config)
    if load_format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = kind.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        return _ready(model, device)
    logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            root,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of any type: a size that contradicts another, a tensor of another shape
        raise CheckpointError(f"{root}: transformers cannot load it: {_first_line(error)}") from None
    _check_tensors(root, config, model, report)
    return _ready(model, device)


def _ready(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    for part in model.modules():
        if isinstance(own := getattr(part, "config", None), PreTrainedConfig) and hasattr(own, "output_router_logits"):
            own.output_router_logits = False
    moved: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return moved


def _check_tensors(root: Path, config: PreTrainedConfig, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raises CheckpointError for a tensor that is missing, is not finite, or would have to be left out."""
    for key, what in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape")):
        if names := sorted(str(name) for name in report[key]):
            where = f"which config.json ({config.model_type}) requires"
            raise CheckpointError(f"{root}: tensor {shown(names[0])} {what}, {where}")
    parts = dict(model.named_modules())
    for name in sorted(report["unexpected_keys"]):
        parent, _, last = str(name).rpartition(".")
        if last in ("weight", "bias") and parent in parts:
            raise CheckpointError(
                f"{root}: tensor {shown(name)} is not part of a {config.model_type} model as config.json describes it; "
                "the output would be wrong without it"
            )
    for name, weight in model.named_parameters():
        if weight.numel() and not bool(torch.stack(torch.aminmax(weight.detach().float())).isfinite().all()):
            raise CheckpointError(f"tensor {name}: holds NaN or infinity as {weight.dtype}; fetch the file again")


def _check_sizes(root: Path, values: dict[str, Any]) -> None:
    """Raises CheckpointError for counts beyond reason, of which transformers makes lists and tables at once."""
    waiting = [values]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            most = next((most for keys, most in LARGEST.items() if key in keys), None)
            if most is not None and isinstance(value, int) and value > most:
                raise CheckpointError(f"config.json ({root}): {key}: must be at most {most}, not {quoted(value)}")


def _dtype(config: PreTrainedConfig, root: Path, load_format: str) -> str:
    """The dtype of the weights, as config.json or else the files name it."""
    dtype = config.dtype
    if dtype is None:
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None)
    if dtype is None and load_format != "dummy":
        checkpoint = Checkpoint(root)
        dtype = DTYPES.get(checkpoint.dtype(min(checkpoint.names)))
    name = str(dtype or torch.float32).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def _first_line(error: Exception) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])
