"""The backends that compute steps (native, torch, cuda), and what they share.

Owns: the size of the KV cache, and `Backend`, the result of loading a backend.
In: the settings, and a model's files or its loaded weights.
Out: a runner, the number of KV blocks, and the rates of compute and copies.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `device`, `execute`, `sample`, `backends/cuda`.
Start with: `backend.py`; `cache_size.py` sizes the KV cache from `memory_needs.py`.
"""
