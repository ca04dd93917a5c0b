"""The allocate stage: KV blocks, prefix cache, preemption and host tier.

Owns: every KV block on the device and on the host, each slot's block tables, and the prefix cache.
In: `StepPlan` from schedule; `Rates` from execute.
Out: `StepGrant` to execute; `PlanReport` to schedule.
Imports: the root of `stages`, `runtime`, the layout of kinds in `kernels/layout`.
Start with: `stage.py`, then `allocator.py`, `slot_blocks.py` and `block_pool.py`; `preemption.py` picks victims, and
`slab_pool.py` lends memory to kinds of layers.
"""
