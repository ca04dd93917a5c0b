"""The allocate stage: the KV blocks, the prefix cache, preemption and the host tier.

Owns: every KV block on the device and on the host, and each slot's block table.
In: `StepPlan`, from schedule.
Out: `StepGrant` to execute, `PlanReport` to schedule.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `stage.py`, then `allocator.py`; `preemption.py` frees blocks under memory pressure.
"""
