"""What execute and sample share: the device thread, array operations, pooling, scoring.

Owns: the device thread and the queue of its steps.
In: forward passes from execute and sampling calls from sample, submitted on the event loop.
Out: their results, as futures that resolve on the event loop.
Imports: the root of `stages`, `runtime`.
Start with: `device.py`; `device_guard.py` finds out whether a device is lost, `step_watch.py` when a step never ends;
`step_result.py` is what a forward pass leaves for its sampling; `arrays.py` the interface to numpy and torch.
"""
