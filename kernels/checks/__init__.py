"""Checks of the Triton kernels without a GPU: cross-compilation and roofline costs.

Owns: the compile cases and the floors of bytes and operations.
In: kernels and shapes.
Out: compiled code inspected for spills and copies; seconds at the roofline.
Imports: all of `kernels`.
Start with: `compile_check.py`; run it as `python -m millrace.kernels.checks.compile_check`.
"""
