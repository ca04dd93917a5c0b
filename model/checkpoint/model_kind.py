"""The kind of model in a checkpoint, from config.json alone, so that nothing large has to be imported first."""

from __future__ import annotations

from pathlib import Path

from ..files import read_json
from ..sentence_files import transformer_folder

# model_type of the encoders, which do not generate text.
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
    """Whether the checkpoint in `root` is an encoder."""
    values = read_json(root / transformer_folder(root), "config.json") or {}
    return values.get("model_type") in BIDIRECTIONAL
