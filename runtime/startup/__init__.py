"""How long a start takes, and how far it is. Depends on no other room.

Owns: the seconds of each phase, and bytes by file of the present one.
In: what the loading threads have done.
Out: states for a log line, a bar, `/health` and the process that waits for another.
Imports: the standard library.
Start with: `load_progress.py`, then `phases.py`.
"""
