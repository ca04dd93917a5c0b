"""Several engine processes behind one front process: data parallel replicas of one model.

Owns: which engine process a request is in, and where it goes when that one dies.
In: tokenized requests, in the stage dispatch; the steps of all engine processes, in the stage merge.
Out: each request to one engine process; their steps in one order, with slots of their own, to detokenize.
Imports: `runtime`, the root of `stages`, `allocate`, `engine`, `executor`, `exit`, `grammar`, `intake`, `routing`,
`split`, `traffic`, `fleet/traffic`.
Start with: `fleet_processes.py`, then `dispatcher.py` (which engine process) and `resuming.py` (after a death).
"""
