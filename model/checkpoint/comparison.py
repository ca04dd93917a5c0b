"""Whether the tensors of a checkpoint are those that its config.json describes. No torch."""

from __future__ import annotations

import re

import numpy as np

from ..errors import CheckpointError, quoted, shown
from ..families.building import Family
from ..families.names import HEAD
from ..families.wrappers import OTHER_HALVES
from ..spec import DecoderSpec
from .canonical import TensorSources, widened
from .safetensors import DTYPES
from .stored_tensors import StoredTensors

NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))")  # in old checkpoints
SIZES_OF = {  # parts of a decoder -> keys of the sizes of their weights
    "embed_tokens lm_head": ["vocab_size", "hidden_size"],
    "q_proj o_proj": ["num_attention_heads", "head_dim", "hidden_size"],
    "k_proj v_proj": ["num_key_value_heads", "head_dim", "hidden_size"],
    "q_norm k_norm": ["head_dim"],
    "gate_proj up_proj down_proj": ["intermediate_size", "hidden_size"],
}
_QUERY = ["num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"]
SIZES_OF_LATENTS = {
    "q_a_proj": ["q_lora_rank", "hidden_size"],
    "q_a_layernorm": ["q_lora_rank"],
    "q_b_proj": [*_QUERY, "q_lora_rank"],
    "q_proj": [*_QUERY, "hidden_size"],
    "kv_a_proj_with_mqa": ["kv_lora_rank", "qk_rope_head_dim", "hidden_size"],
    "kv_a_layernorm": ["kv_lora_rank"],
    "kv_b_proj": ["num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"],
    "o_proj": ["num_attention_heads", "v_head_dim", "hidden_size"],
}


def check_tensors(checkpoint: StoredTensors, sources: TensorSources, spec: DecoderSpec, family: Family) -> None:
    """Raises CheckpointError if the checkpoint's tensors are not those of its configuration."""
    root, names, shapes = checkpoint.root, checkpoint.names, sources.stored_shapes()
    for name, shape in shapes.items():
        if name not in names:
            raise CheckpointError(f"{root}: tensor {name} is missing, which config.json ({spec.family}) requires")
        source = f"{checkpoint.where(name)} ({root}): tensor {name}"
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{source} is {quoted(list(checkpoint.shape(name)))}, and config.json requires {list(shape)}: "
                f"{_sizes(sources.canonical_name(name), spec)}"
            )
        if checkpoint.dtype(name) not in DTYPES:
            raise CheckpointError(
                f"{source}: dtype {checkpoint.dtype(name)} is not supported; supported: {', '.join(DTYPES)}"
            )
    ignored = []
    head, constants = f"{HEAD}.weight", _constants(checkpoint, family, spec)
    for name in sorted(
        names - shapes.keys() - constants - {head, *family.unused(spec)}
    ):  # a head that is not used is equal to the embedding
        is_known = family.has_guessing_layers and _layer_of(name, family) >= spec.num_layers
        if not is_known and _is_weight(checkpoint, name, f"{family.prefix}.") and not _is_zero_bias(checkpoint, name):
            raise CheckpointError(
                f"{checkpoint.where(name)} ({root}): tensor {shown(name)} is not part of a {spec.family} model "
                f"as config.json describes it{_reason(name, spec)}; the output would be wrong without it"
            )
        if not NOT_WEIGHTS.fullmatch(name):
            ignored.append(shown(name))
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        checkpoint.warnings.append(f"tensors that no text is made with are not used: {', '.join(ignored[:3])}{more}")


def _constants(checkpoint: StoredTensors, family: Family, spec: DecoderSpec) -> set[str]:
    """The tensors that hold a number of the family. Raises CheckpointError for another number."""
    expected = {
        pattern.replace("*", str(layer)): number
        for pattern, number in family.constants.items()
        for layer in range(spec.num_layers)
    }
    found = expected.keys() & checkpoint.names
    for name in sorted(found):
        values = widened(checkpoint.array(name)).reshape(-1)
        if not np.allclose(values, expected[name], rtol=0.01, atol=0):
            raise CheckpointError(
                f"{checkpoint.where(name)} ({checkpoint.root}): tensor {name}: must hold {expected[name]:g} in a "
                f"{spec.family} model, not {quoted(values[:3].tolist())}"
            )
    return found


def _is_weight(checkpoint: StoredTensors, name: str, prefix: str) -> bool:
    """Whether a tensor seems to be of the decoder: other heads, other halves and buffers of whole numbers are not."""
    if NOT_WEIGHTS.fullmatch(name) or 0 in checkpoint.shape(name):
        return False
    if name.removeprefix("model.").partition(".")[0] in OTHER_HALVES:
        return False
    return name.startswith((prefix, "model.", "lm_head.")) and checkpoint.dtype(name).startswith(("F", "BF"))


def _is_zero_bias(checkpoint: StoredTensors, name: str) -> bool:
    """Whether a bias adds nothing, as packed layers often have one that the model has not."""
    is_bias = name.endswith(".bias") and len(checkpoint.shape(name)) == 1 and checkpoint.dtype(name) in DTYPES
    return is_bias and not widened(checkpoint.array(name)).any()


def _layer_of(name: str, family: Family) -> int:
    """The number of the layer of a tensor; 0 if it is of none."""
    layers, _, rest = name.removeprefix(f"{family.prefix}.").partition(".")
    number = rest.partition(".")[0]
    return int(number) if layers == "layers" and number.isdecimal() else 0


def _sizes(name: str, spec: DecoderSpec) -> str:
    """The keys of config.json from which the shape of a canonical tensor follows, with their values."""
    moe = next((moe for moe in spec.mixtures if ".experts." in name), None)
    values: dict[str, int | None] = {
        "vocab_size": spec.vocab_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size if moe is None else moe.expert.intermediate_size,
        "hidden_size": spec.hidden_size,
    }
    sizes_of = SIZES_OF
    for latent in spec.latents[:1]:
        ranks = {"q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "v_head_dim": latent.value_dim}
        values |= ranks | {"qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim}
        sizes_of = SIZES_OF_LATENTS | SIZES_OF
    kind = name.split(".")[-2]
    keys = next((keys for kinds, keys in sizes_of.items() if kind in kinds.split()), ["hidden_size"])
    return ", ".join(f"{key} = {values[key]}" for key in keys)


def _reason(name: str, spec: DecoderSpec) -> str:
    """The key of config.json that rules out a bias, if there is one."""
    if not name.endswith(".bias"):
        return ""
    key = "mlp_bias" if ".mlp." in name else "attention_bias"
    return f" ({key} = false)" if spec.family in ("llama", "qwen3") else ""
