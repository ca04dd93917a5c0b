"""Which kind of model a checkpoint is, by its config.json alone, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from ..files import read_json

# Encoders, by transformers' names: they read text and generate none.
BIDIRECTIONAL = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "mpnet",
        "roberta",
        "xlm-roberta",
    }
)


def is_bidirectional(root: Path) -> bool:
    """Whether the checkpoint in `root` is an encoder's."""
    values = read_json(root, "config.json") or {}
    return values.get("model_type") in BIDIRECTIONAL
