"""The torch backend: weights, KV cache and runner, on a GPU or a CPU.

Owns: the tensors of the model, and of its cache.
In: the checkpoint's folder and the settings.
Out: `Backend`, whose runner turns grants into logits.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `device`, `execute`, `sample`, `backends`,
`backends/cuda`.
Start with: `loading.py`; `leading.py` and `rank.py` are the two ends of a model over several ranks.
"""
