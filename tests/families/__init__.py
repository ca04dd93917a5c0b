"""The zoo: a tiny random checkpoint of each family, made by transformers, whose greedy tokens are the oracle.

Owns: the checkpoints and answers of a run, in a folder that goes with it.
In: rows, which are keys of config.json (`rows/`, by kind of family).
Out: equal, differs or refused for each row, backend and way of computing: `python -m tests.families`.
Imports: `millrace.stages` for the engine, transformers for the oracle.
Start with: `row.py`, then `rows/served.py`; `ways.py` has the ways.

A row must make the special path of its family happen: two layers of each kind, prompts beyond windows and chunks,
multipliers other than 1, random norms and biases. `python -m tests.families --list NAME` shows whether a row decides
anything: the least margin of its best logits, and how many tokens of each answer differ.
"""
