"""Models that also read images or sound: the decoder in their `text_config`, and the tensors that are not of it.

Their text half is served as the decoder that it is. Rotary positions with sections for height and width
(`mrope_section`) are plain ones where all tokens are text. Requests with images are refused, and the tensors of the
other halves are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config_keys import ConfigKeys
from ..errors import quoted
from ..spec import DecoderSpec

# What transformers' classes take for keys that files of wrappers leave out, though those of decoders have them
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 151_936,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**SIZES, "intermediate_size": 11_008, "vocab_size": 32_000},
    "mistral": {**SIZES, "intermediate_size": 14_336, "vocab_size": 32_000},
    "qwen2": SIZES,
    "qwen3": SIZES,
}
# Prefixes of a wrapper's decoder in its checkpoint, instead of `model.`
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.")
# First parts of the names of a wrapper's other tensors
OTHER_HALVES = (
    "vision_tower", "vision_model", "visual", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio",
    "image_newline", "image_tower", "video_tower", "vision_embed_tokens", "connector", "aligner", "vqmodel",
    "generation_embeddings", "generation_aligner", "generation_head", "visual_embeddings_table", "vision_encoder",
    "vision_projection", "high_res_vision_model", "high_res_vision_neck", "high_res_vision_proj", "vision_embedder",
    "mtp",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """What the files of a wrapper may leave out."""

    text: str  # model_type of the decoder
    is_tied: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)  # of the text_config
    has_cap: bool = False  # its logits are capped as its decoder's, instead of not at all


WRAPPERS: Mapping[str, Wrapper] = {
    "aya_vision": Wrapper(text="cohere2", is_tied=True),
    "cohere2_vision": Wrapper(text="cohere2", is_tied=True),
    "gemma3": Wrapper(text="gemma3_text", is_tied=True),
    "gemma4": Wrapper(text="gemma4_text", is_tied=True, has_cap=True),
    "gemma4_unified": Wrapper(text="gemma4_unified_text", is_tied=True, has_cap=True),
    "got_ocr2": Wrapper(text="qwen2", is_tied=True),
    "idefics3": Wrapper(text="llama", values={"rms_norm_eps": 1e-5}),
    "internvl": Wrapper(text="qwen2", is_tied=True),
    "llava": Wrapper(text="llama"),
    "llava_next": Wrapper(text="llama"),
    "llava_next_video": Wrapper(text="llama"),
    "llava_onevision": Wrapper(text="qwen2"),
    "mistral3": Wrapper(text="mistral", is_tied=True),
    "qwen2_5_vl": Wrapper(text="qwen2_5_vl_text"),
    "qwen2_vl": Wrapper(text="qwen2_vl_text"),
    "qwen3_5": Wrapper(text="qwen3_5_text"),
    "qwen3_5_moe": Wrapper(text="qwen3_5_moe_text"),
    "qwen3_vl": Wrapper(text="qwen3_vl_text"),
    "smolvlm": Wrapper(text="llama", values={"rms_norm_eps": 1e-5}),
}
SHARED = ("dtype", "torch_dtype", "bos_token_id")  # keys that hold for both


def with_own_head(spec: DecoderSpec, wrapper: str) -> DecoderSpec:
    """The spec of a wrapper: its output layer is its own, without a scale and mostly without a cap, as in transformers.

    `wrapper` is its model_type.
    """
    cap = spec.head.soft_cap if WRAPPERS[wrapper].has_cap else None
    return replace(spec, head=replace(spec.head, scale=1.0, soft_cap=cap))


def text_half(keys: ConfigKeys) -> ConfigKeys:
    """The keys of a wrapper's decoder, with those of the wrapper that hold for both."""
    wrapper, inner = WRAPPERS[keys.values["model_type"]], keys.values.get("text_config")
    if inner is None and "hidden_size" in keys.values:  # Qwen2-VL and 2.5-VL, as they were published
        inner = {key: value for key, value in keys.values.items() if key != "model_type"}
    if not isinstance(inner, dict):
        keys.fail("text_config", f"must be an object, not {quoted(inner)}")
    model_type = inner.get("model_type") or wrapper.text
    shared = {key: keys.values[key] for key in SHARED if keys.values.get(key) is not None}
    defaults = {**DEFAULTS.get(str(model_type), {}), **wrapper.values}
    values = {**defaults, **shared, **inner, "model_type": model_type}
    ends = [config["eos_token_id"] for config in (keys.values, inner) if config.get("eos_token_id") is not None]
    if ends:  # the wrapper's may be those of turns
        values["eos_token_id"] = [token for end in ends for token in (end if isinstance(end, list) else [end])]
    text = ConfigKeys(values, f"{keys.source}: text_config")
    ties = [keys.flag("tie_word_embeddings", wrapper.is_tied), text.flag("tie_word_embeddings", False)]
    values["tie_word_embeddings"] = any(ties)  # files say it in either place; if the output layer differs, it is used
    return text
