"""The choice of an engine for a request: by what each has cached, and by how long it would take.

Owns: nothing that runs; the choice is plain code, without a clock.
In: reports of engines, and the keys of the blocks that they have cached.
Out: an engine for each request.
Imports: `schedule`, `allocate`, `runtime`.
Start with: `score.py`, then `policies.py`.
"""
