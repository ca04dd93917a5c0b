"""The memory of KV blocks, by tier: pools and block tables on the device, swapped and cached blocks on the host.

Owns: which blocks are free, in use or cached, on the device and on the host; the block tables; slabs lent to kinds.
In: what the plan in hand takes and gives back; completed steps.
Out: block ids; what was evicted.
Imports: the root of `stages`, the layout of kinds in `kernels/layout`.
Start with: `device_tier.py` and `host_tier.py`; `block_pool.py` is the pool of one kind.
"""
