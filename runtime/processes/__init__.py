"""Child processes, the link between two processes, and the helper pool.

Owns: sockets, frames, and the life of child processes.
In: messages for channels that reach across a process boundary; jobs for helpers.
Out: the same messages on the other side, in order; results of jobs, or their limits exceeded.
Imports: `runtime` and its rooms `env`, `trace`, `workers`.
Start with: `link.py`; `wire.py` says how a message becomes bytes.
"""
