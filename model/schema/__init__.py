"""JSON schemas as rules that a grammar can hold an answer to.

Owns: which objects are closed, which keywords constrain nothing, exact numbers and their ranges.
In: JSON schemas of clients, as Python data.
Out: schemas and rules for `model/text/grammar.py`.
Imports: nothing of `model`.
Start with: `schema_rules.py`.
"""
