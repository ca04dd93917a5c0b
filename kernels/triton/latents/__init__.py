"""Attention over latents in Triton, in its absorbed form.

Owns: the kernel of its prologue, and how the attention kernel walks one head of keys whose first numbers are values.
In: tensors, and a step's attention plan.
Out: what `LatentKernels` in `kernels/layer_kernels.py` says.
Imports: `kernels/reference` for products of heads, and `kernels/triton`; Triton, torch.
Start with: `launches.py`; the twins are in `kernels/reference/latents.py`.
"""
