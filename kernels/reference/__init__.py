"""The kernels in plain PyTorch: the path on a CPU, and the oracle of the Triton kernels.

Owns: the meaning of each kernel: signature, shapes, result.
In: tensors, with the signatures of `kernels/kernel_set.py`.
Out: tensors.
Imports: `kernels/layout`.
Start with: `layers_and_attention.py`.
"""
