"""The kernels in Triton, each with the signature of its twin in `kernels/reference`.

Owns: the Triton code and how it is launched. The kernels of a step's state have their twins in `kernels/layout`.
In: tensors on a GPU, or on the CPU under Triton's interpreter.
Out: tensors.
Imports: `kernels/layout`, `kernels/reference`, torch, triton.
Start with: `kernel_set.py`, the list of kernels, then `attention.py`; `launch.py` has what all launches share.
"""
