"""Models that also read images, whose text half is a decoder: whole checkpoints, asked for text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.families.row import BOTH, FALLBACK, NEITHER, OWN, Path, Row, layer_types, row
from tests.families.rows.gemma4 import INPUTS
from tests.families.rows.norms import TWO_ROPES
from tests.families.rows.served import LLAMA3, TEMPERED

SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SIGHT: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
NO_IMAGE = 1000  # an id that no prompt has


def image_model(
    name: str,
    model_type: str,
    text: Mapping[str, Any],
    *,
    vision: Mapping[str, Any] | None = None,
    by: tuple[Path, ...] = BOTH,
    image: str = "image_token_id",
    seed: int = 0,
    embed_std: float = 0.3,
    **keys: Any,
) -> Row:
    """A row with a text half and a small encoder of images."""
    return row(
        name,
        model_type,
        auto="AutoModelForImageTextToText",
        text_config=text,
        vision_config=SIGHT if vision is None else vision,
        by=by,
        seed=seed,
        embed_std=embed_std,
        **{image: NO_IMAGE},
        **keys,
    )


QWEN2 = {"model_type": "qwen2"}
LLAMA = {"model_type": "llama", "head_dim": 8}
COHERE2 = {
    "model_type": "cohere2",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": layer_types("sfsf"),
    "logit_scale": 0.25,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 16,
    "query_pre_attn_scalar": 20,
    "layer_types": layer_types("sfsf"),
    "rope_parameters": TWO_ROPES,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": layer_types("sfsf"),
    "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
    "final_logit_softcapping": 8.0,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

ROWS = (
    image_model("gemma3-image", "gemma3", seed=7, embed_std=0.024, text=GEMMA3, image="image_token_index"),
    image_model(
        "gemma4-image",
        "gemma4",
        {**GEMMA4, **INPUTS, "model_type": "gemma4_text", "num_kv_shared_layers": 2},
        embed_std=0.08,
        vision={
            **SIGHT,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 64,
        },
    ),
    image_model(
        "gemma4-unified",
        "gemma4_unified",
        {**GEMMA4, "model_type": "gemma4_unified_text"},
        embed_std=0.08,
        vision={
            "model_type": "gemma4_unified_vision",
            "mm_embed_dim": 16,
            "mm_posemb_size": 16,
            "output_proj_dims": 16,
        },
    ),
    image_model(
        "mistral3-image",
        "mistral3",
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        vision={**SIGHT, "model_type": "pixtral", "head_dim": 8},
        image="image_token_index",
    ),
    image_model(
        "mistral3-ministral3",
        "mistral3",
        {"model_type": "ministral3", "head_dim": 8, "rope_parameters": TEMPERED},
        vision={**SIGHT, "model_type": "pixtral", "head_dim": 8},
        image="image_token_index",
    ),
    image_model(
        "llava-llama",
        "llava",
        seed=1,
        text={**LLAMA, "rope_parameters": LLAMA3},
        vision={**SIGHT, "model_type": "clip_vision_model"},
        image="image_token_index",
    ),
    image_model(
        "llava-mistral",
        "llava",
        {"model_type": "mistral", "head_dim": 12, "sliding_window": 16},
        vision={**SIGHT, "model_type": "pixtral", "head_dim": 8},
        image="image_token_index",
    ),
    image_model(
        "aya-vision",
        "aya_vision",
        COHERE2,
        vision={**SIGHT, "model_type": "siglip_vision_model"},
        image="image_token_index",
    ),
    image_model("cohere2-vision", "cohere2_vision", COHERE2, vision={**SIGHT, "model_type": "siglip_vision_model"}),
    image_model("internvl", "internvl", QWEN2, vision={**SIGHT, "image_size": [28, 28], "patch_size": [14, 14]}),
    image_model("smolvlm", "smolvlm", LLAMA),
    image_model("idefics3", "idefics3", LLAMA),
    image_model(
        "qwen2-vl",
        "qwen2_vl",
        {"model_type": "qwen2_vl_text", "rope_parameters": SECTIONS},
        vision={**QWEN_SIGHT, "embed_dim": 16, "hidden_size": 32},
    ),
    image_model(
        "qwen2.5-vl",
        "qwen2_5_vl",
        seed=1,
        text={"model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS},
        vision={**QWEN_SIGHT, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16},
    ),
    image_model(
        "qwen3-vl",
        "qwen3_vl",
        {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": SECTIONS},
        vision={
            **QWEN_SIGHT,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    image_model(
        "qwen3.5-image",
        "qwen3_5",
        {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": layer_types("lflf"),
            "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]},
        },
        vision={**QWEN_SIGHT, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16},
        by=OWN,
    ),
    image_model(
        "qwen3.5-moe-image",
        "qwen3_5_moe",
        {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": layer_types("lflf"),
            "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]},
        },
        vision={**QWEN_SIGHT, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16},
        by=OWN,
    ),
    image_model(
        "glm4v",
        "glm4v",
        seed=2,
        text={
            "model_type": "glm4v_text",
            "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        },
        vision={**QWEN_SIGHT, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "image_size": 28},
        by=FALLBACK,
    ),
    image_model(
        "llava-next",
        "llava_next",
        LLAMA,
        vision={**SIGHT, "model_type": "clip_vision_model"},
        image="image_token_index",
    ),
    image_model(
        "llava-next-video",
        "llava_next_video",
        LLAMA,
        vision={**SIGHT, "model_type": "clip_vision_model"},
        image="image_token_index",
    ),
    image_model(
        "llava-onevision",
        "llava_onevision",
        QWEN2,
        vision={**SIGHT, "model_type": "siglip_vision_model"},
        image="image_token_index",
    ),
    image_model(
        "got-ocr2",
        "got_ocr2",
        QWEN2,
        by=OWN,
        vision={**SIGHT, "mlp_dim": 16, "output_channels": 16, "global_attn_indexes": [0]},
        image="image_token_index",
    ),
    image_model(
        "paligemma",
        "paligemma",
        {"model_type": "gemma", "head_dim": 8},
        vision={**SIGHT, "projection_dim": 32},
        image="image_token_index",
        by=NEITHER,
        projection_dim=32,
    ),
    image_model(
        "lfm2-vl",
        "lfm2_vl",
        {
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": layer_types("vfvf"),
            "block_auto_adjust_ff_dim": False,
        },
        by=NEITHER,
    ),
)
