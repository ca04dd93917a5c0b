"""What execute and sample share of the device: its thread, array operations, pooling.

Owns: the device thread and the queue of its steps.
In: steps of execute and sample.
Out: their results, on the event loop.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `device.py`.
"""
