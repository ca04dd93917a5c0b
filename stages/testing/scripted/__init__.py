"""The scripted device: produces predictable answers, and checks every grant.

Owns: the script, and the owner of each block.
In: grants.
Out: tokens of the script; a list of violations, which the engine raises as AssertionError.
Imports: all of `stages`.
Start with: `script.py`, then `device.py`.
"""
