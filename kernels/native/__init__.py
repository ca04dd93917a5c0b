"""The native step: a decoder from token ids to logits in one call of a C++ library, for CPUs. Numpy and ctypes only.

Owns: the compiled library, packed weights, the paged cache of a CPU, and the compute threads.
In: weights; block tables and columns of slots as numpy arrays.
Out: hidden states, logits or token ids.
Imports: `kernels/layout/grouped_codes.py`, numpy, ctypes.
Start with: `model.py`; `README.md` maps the C++ files.
"""
