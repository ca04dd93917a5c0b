"""The asynchronous device: submits steps to a GPU without waiting for their results.

Three threads call it: the event loop (`AsyncDevice`), the device thread, which submits steps, and the completion
thread, which waits for them. Each class says which of its methods runs where.

Owns: device buffers, CUDA graphs, pinned memory, and the order of copies and launches.
In: grants, uploaded as one buffer per step.
Out: tokens, copied back when the step is done.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `device`, `grammar`, `execute`, `sample`.
Start with: `async_device.py`, then `step_submission.py`.
"""
