"""Recordings of schedule and allocate: writing, replay, and simulation with other settings.

Owns: the file format, and the cost model of steps.
In: an engine's calls, or a recording.
Out: a file, replayed decisions, or predicted latencies.
Imports: the root of `stages`, `runtime`, and the rooms `schedule`, `allocate`, `intake`.
Start with: `format.py`, then `replay.py`.
"""
