"""How long a step takes, how many tokens it may hold, and when to plan the next one.

Owns: the model of step times, the token budget of a step, the lead of a plan.
In: what each step held and how long it took. Out: numbers, to the scheduler and the planner.
Imports: the root of `stages`.
Start with: `step_budget.py`, then `step_time_model.py`.
"""
