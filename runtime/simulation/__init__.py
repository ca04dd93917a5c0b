"""Deterministic simulation: an event loop with virtual time and a seeded order of tasks.

Owns: the simulated loop, its env, its scheduling policies and its fault points.
In: a coroutine, a seed and a policy.
Out: the coroutine's result, or a deadlock or livelock with the tasks involved.
Imports: `runtime/env`, `runtime/workers`.
Start with: `run.py`; `testing.py` has the test decorators, `transport.py` a connection for links.
"""
