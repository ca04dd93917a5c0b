"""The allocate stage: KV blocks, prefix cache, preemption and host tier.

Owns: every KV block on the device and on the host, each slot's block tables, and the prefix cache.
In: `StepPlan` from schedule; `Rates` from execute.
Out: `StepGrant` to execute; `PlanReport` to schedule.
Imports: the root of `stages`, `allocate/tiers`, `runtime`, the layout of kinds in `kernels/layout`.
Start with: `stage.py`, then `allocator.py`, `slot_blocks.py` and `tiers/`; `preemption.py` picks victims.

`tiers/` holds the blocks. `slot_blocks.py` has them for the slots: `sequence_starts.py` gives a starting sequence its
cached or swapped ones, `plan_growth.py` gives the rows of a plan new ones, and `window_blocks.py` takes those that a
window has passed.

Of a model whose layers have windows, `KVLayout` in `kernels/layout/kv_layout.py` says what a kind and a slab are. In
`tiers/`, `slab_pool.py` lends slabs to kinds and `block_tables.py` retires what a window leaves behind. Here,
`kind_index.py` has what the prefix cache knows of the kinds after the first, and `state_snapshots.py` what it knows of
the states of recurrent layers. While the same rows decode, `steady_decode.py` has them go on in the blocks that their
windows have passed. The tests' `kinds_walk.py` lists what must hold.
"""
