"""The decoder: weights, KV cache and one step as a plain function of tensors.

Owns: weights in the form the device wants, rotary tables, the memory of the KV cache.
In: a checkpoint, and one `StepInputs` a step.
Out: logits, or hidden states.
Imports: `model`, `model/checkpoint`, `kernels`.
Start with: `decoder.py`; `native_decoder.py` is the same through the C++ library.
"""
