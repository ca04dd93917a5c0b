"""The commands of a fleet over several machines: `millrace engine` and `millrace route`.

Owns: nothing.
In: the addresses of engines, the file of the fleet's key, and settings.
Out: an exit code.
Imports: `runtime`, `stages`, the root of `deploy`, `cli`, `http`, `metrics`.
Start with: `engine.py`, then `route.py`.
"""
