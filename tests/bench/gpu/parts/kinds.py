"""Models whose layers are of other kinds: recurrent, of two head sizes, over latents, with experts in codes.

Tiny ones with drawn weights, which have not run on a device before: whole engines with CUDA graphs, copies beside the
steps and snapshots answer as the plain runner with PyTorch's kernels does. It shows that they hold, not how fast.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.gpu.parts.gates import KINDS, Ask, Gate, pass_gate
from tests.bench.gpu.parts.workload import options_of
from tests.bench.gpu.place import TINY, Place

NUM_TOKENS, DRY_TOKENS = 24, 2
PROMPTS = [[*range(3, 120)], [9, 8], [*range(40, 57)], [*range(3, 110), 7]]  # the last begins as the first
WIDE: dict[str, Any] = {**TINY, "num_hidden_layers": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
}
MODELS: dict[str, dict[str, Any]] = {
    "delta rule": {**WIDE, "model_type": "qwen3_5_text", **LINEAR},
    "Mamba-2": {**WIDE, "model_type": "granitemoehybrid", **MAMBA},
    "two head sizes": {
        **WIDE,
        "model_type": "gemma4_text",
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "num_kv_shared_layers": 2,
    },
    "latents": {**WIDE, "model_type": "minicpm3", "num_key_value_heads": 4, **LATENT},
}
TIGHT = {"max_model_len": 192, "block_size": 16, "num_gpu_blocks": 20, "num_cpu_blocks": 64, "swap_space": None}


def run(place: Place) -> None:
    """The part `kinds`."""
    for name, shape in list(MODELS.items())[: 1 if place.is_dry else None]:
        with place.trying(name), TemporaryDirectory() as folder:
            options = options_of(place, shape, Path(folder)) | {"max_model_len": 192, "max_num_seqs": 4}
            gate = Gate(name, {"dtype": "float32"}, tuple(_variants(place)))
            pass_gate(place, gate, options, _asks(place), DRY_TOKENS if place.is_dry else NUM_TOKENS)


def _variants(place: Place) -> list[dict[str, Any]]:
    """Settings that may not change an answer."""
    if place.is_dry:
        return [{"attention_backend": "torch", "steps_in_flight": count} for count in (1, 2)]
    return [
        {"attention_backend": "torch", "async_scheduling": False},
        {"attention_backend": "triton", "steps_in_flight": 2},
        {"attention_backend": "triton", "enforce_eager": True},
        {"attention_backend": "triton", **TIGHT},
    ]


def _asks(place: Place) -> list[Ask]:
    greedy = KINDS[0]
    prompts = PROMPTS[1:2] if place.is_dry else [*PROMPTS, *PROMPTS[::-1]]
    return [Ask(prompt, greedy) for prompt in prompts]
