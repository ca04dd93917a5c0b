"""Checks of the Triton kernels: cross-compilation without a GPU, and roofline costs.

Owns: the list of kernel configurations in use, and the least bytes and operations of each kernel.
In: kernels and shapes.
Out: the compiled code's registers, spills and copies; seconds at the roofline.
Imports: `kernels/layout`, `kernels/tilings`, `kernels/triton`.
Start with: `compile_check.py`; run it as `python -m millrace.kernels.checks.compile_check`, and `early_check` likewise.
"""
