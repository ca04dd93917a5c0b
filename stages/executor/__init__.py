"""Starts and ends what computes a model's steps beside the device thread: the ranks of a group.

Owns: the interface `Executor`, ranks as threads and as processes, the messages between rank 0 and the others; and
`EngineHost`, which a process that runs an engine elsewhere is to the front process.
In: a number of ranks. Out: members of an `OrderLine`, and how they join their sums.
Imports: the root, `runtime/processes`, `model/sharding`.
Start with: `executor.py`; `backends/torch/ranks.py` uses it.
"""
