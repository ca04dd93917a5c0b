"""The bundled demo model: the world it knows, the text made from it, its training, and its weights."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # a checkpoint folder like any other: config, safetensors, tokenizer
