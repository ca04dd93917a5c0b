"""Labels of engines: what an operator says of one, such as the version of its model.

Owns: nothing that runs; choices are plain code, without a clock.
In: what an operator says of an engine.
Out: its labels, checked.
Imports: the root of `stages`.
Start with: `labels.py`.
"""
