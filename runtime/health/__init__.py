"""Stall detection, and the flight recorder that saves what led to a stall or crash.

Owns: the rules for a stall, and the files of the flight recorder.
In: the pipeline's stages and channels, inspected at each tick of the watch.
Out: stall reports, and one file of JSON lines per incident.
Imports: `runtime` and its room `trace`.
Start with: `stalls.py`.
"""
