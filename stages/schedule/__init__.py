"""The schedule stage: which sequences run in the next step, and how many tokens of each.

Owns: the waiting queue, the slots, the state of every sequence, and the credits of the step loop.
In: `TokenRequest` from tokenize; `PlanReport`, `StepDone`, `StepVoid` as feedback; the control lane.
Out: `StepPlan`, to allocate.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `stages/grammar`.
Start with: `stage.py`, then `scheduler.py`; `policy.py` orders requests and picks preemption victims.
"""
