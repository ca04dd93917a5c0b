"""What computes steps: cache size, memory needs and measured rates common to all backends.

Owns: the `Backend` that a model's loading ends in.
In: a loaded model and the settings.
Out: a runner, the number of KV blocks, and the rates of compute and copies.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, the stage rooms.
Start with: `backend.py`.
"""
