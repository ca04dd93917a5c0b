"""Model loading: from a model's name to its files, tokenizer, backend and sampler.

Owns: nothing after the start.
In: a folder or Hub id, and the settings.
Out: a `LoadedModel`, or a `LoadedEncoder`.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `device`, `grammar`, all of `backends`, and the stage
rooms `tokenize`, `encode`, `execute`, `sample`.
Start with: `model.py`; `early.py` runs first, before the engine is imported; `encoder.py` loads encoder models.
"""
