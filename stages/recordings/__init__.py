"""Recordings of schedule and allocate: made, replayed, simulated with other settings.

Owns: the file format, and the cost model of steps.
In: an engine's calls, or a recording.
Out: a file, decisions made again, or predicted latencies.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, the stage rooms.
Start with: `format.py`, then `replay.py`.
"""
