"""Experts in Triton: tokens routed and listed by expert on the device, then products of each expert with its rows.

Owns: routing, the lists of pairs by expert, the grouped products, and the sum over a token's experts.
In: tensors, and what `kernels/layout/experts.py` says of a layer.
Out: what `ExpertKernels.routed_experts` says.
Imports: `kernels/layout`, `kernels/tilings`, and `kernels/triton` for early launches and activations; Triton, torch.
Start with: `launches.py`; the twins are in `kernels/reference/experts.py`.
"""
