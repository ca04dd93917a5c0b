"""The kernels in Triton, with the signatures of their twins in `kernels/reference`.

Owns: the Triton code and how it is launched.
In: tensors on a GPU, or on the CPU under Triton's interpreter.
Out: tensors.
Imports: `kernels/layout`, `kernels/reference`, triton.
Start with: `attention.py`; `launch.py` holds what all launches share.
"""
