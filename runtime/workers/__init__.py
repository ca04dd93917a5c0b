"""Threads that work for an event loop: jobs in order, and results handed back to the loop.

Owns: the threads, their queues, and the order in which jobs and results are processed.
In: jobs: plain callables, from a stage or from the device.
Out: results, delivered on the event loop or to the thread that waits for them.
Imports: the standard library only.
Start with: `worker.py`, the interface; `thread_worker.py` implements it with real threads.
"""
