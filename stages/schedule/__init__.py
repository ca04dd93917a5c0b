"""The schedule stage: chooses the sequences of each step, and how many tokens of each.

Owns: the waiting queue, the slots, the state of every sequence, the credits of the step loop, and speculation.
In: `TokenRequest` from tokenize; `PlanReport` from allocate; `StepDone`, `StepVoid` from sample; the control lane.
Out: `StepPlan`, to allocate.
Imports: the root of `stages`, `runtime`, its own `step_timing`.
Start with: `stage.py`, then `scheduler.py` and `planner.py`; `policy.py` is the part that users may replace, and
`step_timing` says how much a step may hold.
"""
