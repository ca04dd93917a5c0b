"""Engines on a Ray cluster: actors in place of child processes. Ray finds nodes for them and notices their end.

Owns: the placement group of a fleet and its actors.
In: settings of an engine. Out: hosts of engine processes, as `stages/executor/engine_host.py` says; tokens and control
messages go over links and never through Ray.
Imports: ray, only when it is asked for, and `pip install 'millrace-engine[ray]'` brings it; `stages`, `runtime`.
Start with: `ray_engine.py`, then `ray_executor.py`; `placement.py` has the decisions, without Ray.
"""
