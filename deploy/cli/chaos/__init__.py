"""`millrace chaos`: a fleet on loopback under faults, and a check of all that its clients saw.

Owns: the processes of that fleet, the relays between them, and the history of each request.
In: the size of the fleet, a seed, a plan of strikes.
Out: what each strike cost, each violation, an exit code.
Imports: `runtime`, the root of `stages`, the root of `deploy`.
Start with: `chaos_run.py`, then `plan.py` (what is struck), `relay.py` (links) and `checks.py` (what must hold).
"""
