"""The scripted device: produces predictable answers, and checks every grant.

Owns: the script, and the owner of each block.
In: grants.
Out: tokens of the script; a list of violations, which the engine raises as AssertionError.
Imports: `runtime`, `model`, `kernels`, the root of `stages`, `device`, `grammar`, `sample`, `backends/cuda`, `loading`,
`engine`.
Start with: `script.py`, then `device.py`.
"""
