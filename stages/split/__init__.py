"""An engine in two processes: the front process (HTTP, text) and the engine process.

The engine process runs the step loop.

Owns: the link between the two, the engine process, and the table of requests in flight.
In: requests, in the front process.
Out: tokenized requests to the engine process; answers in the front process, no token twice after a restart.
Imports: `runtime`, `model`, the root of `stages`, `engine`, `loading`, `recordings`, `traffic`, and the rooms of the
step loop.
Start with: `remote_core.py` (front process) and `engine_process.py`; `protocol.py` has the messages between them,
`step_loop.py` the stages that an engine process runs.
"""
