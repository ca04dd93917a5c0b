"""LoRA in Triton: adapters in device slots, added to products inside CUDA graphs.

Owns: the sort of a step's tokens by adapter, the products with A (shrink), and those with B (expand).
In: tensors, and the lists and matrices of `kernels/layout/lora_lists.py`.
Out: what `LoraKernels` in `kernels/layer_kernels.py` says.
Imports: `kernels/layout`, and `kernels/triton` for early launches and activations; Triton, torch.
Start with: `launches.py`; the twins are in `kernels/reference/lora_slots.py`.
"""
