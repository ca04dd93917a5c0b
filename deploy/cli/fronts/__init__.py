"""The processes of `--front-processes`: the supervisor's command, a front, and an engine that fronts share.

Owns: nothing.
In: settings; in a child also the words of the supervisor.
Out: an exit code.
Imports: `runtime`, `stages`, the root of `deploy`, `cli`, `cli/machines`, `front_processes`, `http`, `server`.
Start with: `supervise.py`, then `front_process.py`.
"""
