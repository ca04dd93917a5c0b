"""The native backend: computes a whole step in one C++ call, on a CPU.

Owns: the runner of the native library, and its KV cache.
In: grants, on the device thread; the next ones in advance, on the event loop.
Out: logits, or tokens chosen in C++.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `device`, `grammar`, `execute`, `sample`, `backends`.
Start with: `loading.py`, then `runner.py`; `step_ahead.py` says what two threads share, and why without a lock.
"""
