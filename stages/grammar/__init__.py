"""Structured output: grammars compiled beside the loop, and the token masks they give.

Owns: compiled grammars, the matcher of each sequence, and thinking budgets.
In: grammars of requests, and the tokens chosen.
Out: masks of allowed tokens.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `gate.py`, then `masks.py`.
"""
