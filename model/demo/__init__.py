"""The bundled demo model. `weights/` is a checkpoint folder like any other; `making/` is the code that trained it."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # config, safetensors, tokenizer
