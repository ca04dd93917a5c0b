"""Quantized checkpoints in safetensors: AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes.

Owns: which format a config.json names, and the numbers that its packed tensors stand for.
In: `quantization_config`, and the tensors as stored.
Out: the weights in float32, under the names of an unquantized checkpoint.
Imports: the root of `model`.
Start with: `formats.py`, then `unpacked.py`.
"""
