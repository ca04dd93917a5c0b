"""The intake stage: checks each request once, before the engine spends any work on it.

Owns: the counts of requests in progress and waiting, and the estimate of the waiting time.
In: `Request`, from a client; calls from the exit when a request starts and ends.
Out: `Request` to tokenize; or `Refused` (invalid) or `Overloaded` (no room now) to the exit.
Imports: the root of `stages`, `runtime`.
Start with: `stage.py`; `admission.py` limits the load; `../request_limits.py` checks against the model.
"""
