"""What the host leaves between two steps of a GPU: the real engine, over a device that only takes time.

Owns: the timed device, and the fit of its step times to measured ones.
In: the workload of 256 requests of `tests/bench/gpu`.
Out: idle share of the device, submission time, and the host's time by stage and thread.
Imports: the product, `tests/bench`.
Start with: `__main__.py`.
"""
