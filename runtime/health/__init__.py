"""Detection of stalls, and the flight recorder that writes down what led to one.

Owns: the rules for a stall, and the files of the flight recorder.
In: the pipeline's stages and channels, as the watch sees them.
Out: stall reports, and one JSON file an incident.
Imports: `runtime` and its rooms `env`, `trace`.
Start with: `stalls.py`.
"""
