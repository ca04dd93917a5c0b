"""The kernels in plain PyTorch: the path on a CPU, and the oracle of the Triton kernels.

Owns: how each kernel of `kernels/kernel_set.py` computes in PyTorch; the protocols there own signatures and shapes.
In: tensors on any device; on a GPU the attention kernels wait for the device.
Out: tensors.
Imports: `kernels/layout`, torch; numpy alone for `grouped.py`, the twin of a product of the native library.
Start with: `kernel_set.py`, the list of kernels, then `attention.py`.
"""
