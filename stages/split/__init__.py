"""An engine in two processes: HTTP and text in the front, the step loop in the engine process.

Owns: the link between the two, and the table of requests in flight.
In: requests, in the front.
Out: the same requests in the engine process; answers in the front, none twice after a restart.
Imports: all of `stages` but `testing`.
Start with: `split_engine.py`; `protocol.py` says what crosses.
"""
