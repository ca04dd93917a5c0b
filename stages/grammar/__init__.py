"""Structured output: grammars compiled off the event loop, token masks, thinking budgets.

Owns: compiled grammars, the matcher of each sequence, and the state of thinking budgets.
In: grammars of requests, and the chosen tokens.
Out: masks of allowed tokens, and tokens forced by a thinking budget.
Imports: the root of `stages`, `runtime`, `model`.
Start with: `gate.py` (before a request is admitted), then `masks.py` (while it runs).
"""
