"""The decoder: weights, KV cache and one step as a plain function of tensors.

Owns: weights in the form that suits the device, rotary tables, the memory of the KV cache.
In: a checkpoint, and one `StepInputs` a step.
Out: logits, or hidden states.
Imports: `model`'s own files, `model/checkpoint`, `model/sharding`, `kernels`.
Start with: `decoder.py`; `native_decoder.py` is the same model through the C++ library.
"""
