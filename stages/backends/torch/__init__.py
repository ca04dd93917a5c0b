"""The torch backend: weights, cache and runner on a GPU or, where native cannot, on a CPU.

Owns: tensors of the model.
In: grants.
Out: logits.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, the stage rooms, `stages/backends`.
Start with: `loading.py`.
"""
