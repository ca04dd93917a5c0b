"""The kind of model in a checkpoint, from its JSON files alone, so that nothing large has to be imported first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json
from ..sentence_files import has_modules, transformer_folder

# model_type of the encoders of transformers, for a config.json that names its architecture as "...Model" or for a
# classifier; one that predicts masked tokens says so. Loading tests that tokens attend in both directions.
ENCODERS = frozenset(
    {
        *("albert", "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
        *("deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel"),
        *("gte", "ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert"),
        *("modernbert", "mpnet", "mra", "neomme", "nomic_bert", "nystromformer", "rembert", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "ultrabert", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xmod", "yoso"),
    }
)


def is_bidirectional(root: Path) -> bool:
    """Whether the checkpoint in `root` is an encoder: tokens attend in both directions, no text is generated."""
    values = read_json(root / transformer_folder(root), "config.json") or {}
    if attends_both_ways(values):
        return True
    names = architectures(values)
    if values.get("is_decoder") is True or any(name.endswith("ForCausalLM") for name in names):
        return False
    if any(name.endswith(("ForMaskedLM", "EncoderModel")) for name in names):
        return True
    if values.get("is_encoder_decoder") is True:  # its encoder alone makes embeddings
        return has_modules(root)
    return str(values.get("model_type")) in ENCODERS


def architectures(values: Mapping[str, Any]) -> list[str]:
    """The names of classes in a config.json; none if it holds no list of them."""
    names = values.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def attends_both_ways(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says so of a model that would otherwise be a decoder, as that of EmbeddingGemma does."""
    parts = [part for part in (values, values.get("text_config")) if isinstance(part, dict)]
    return any(
        part.get("is_causal") is False or part.get("use_bidirectional_attention") in (True, "all") for part in parts
    )
