"""The native backend: the whole step in one C++ call, on a CPU.

Owns: the runner of the native library and its cache.
In: grants.
Out: logits, or tokens chosen in C++.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, the stage rooms, `stages/backends`.
Start with: `loading.py`, then `runner.py`.
"""
