"""The bundled demo model. `weights/` is a checkpoint folder like any other; `making/` is the code that trained it.

Owns: the weights, the tokenizer and the figures of its evaluation.
In: nothing.
Out: `WEIGHTS`, the checkpoint folder.
Imports: nothing.
Start with: `README.md`.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # config, safetensors, tokenizer
