"""From a model's name to an engine's parts: files, tokenizer, backend.

Owns: nothing after the start.
In: a folder or Hub id, and the settings.
Out: a `LoadedModel`.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `stages/backends`.
Start with: `model.py`; `early.py` starts before the engine is imported.
"""
