"""The asynchronous device: steps submitted to a GPU while the host goes on.

Owns: device buffers, CUDA graphs, pinned memory, and the order of copies and launches.
In: grants, as one buffer a step.
Out: tokens, copied back when the step is done.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, the stage rooms, `stages/backends`.
Start with: `async_device.py`, then `step_submission.py`.
"""
