"""The bundled demo model: its weights, a checkpoint folder like any other. `making/` is how they were made."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # a checkpoint folder like any other: config, safetensors, tokenizer
