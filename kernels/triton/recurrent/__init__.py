"""Recurrent layers in Triton: causal convolution, gated delta rule and Mamba-2, over states by slot.

Owns: their kernels, which take a sequence's tokens one after another, or those of prompts in chunks.
In: tensors, and the rows of a step's sequences (`SequenceRows`).
Out: what `RecurrentKernels` in `kernels/layer_kernels.py` says.
Imports: `kernels/reference` for `SequenceRows`, and `kernels/triton` for early launches; Triton, torch.
Start with: `launches.py`; the twins are in `kernels/reference/recurrent.py`.
"""
