"""Several front processes on one port: a supervisor starts them and the engines, and each front answers for all.

Owns: the child processes of `serve` and `route` with `--front-processes`, their restarts, the sums of their metrics,
and how a request reaches the front that has what it names.
In: settings, words of the children, HTTP requests that are about another front.
Out: words to the children, answers for all fronts.
Imports: `model`, `runtime`, `stages`, the root of `deploy`, `api`, `http`, `metrics`, `websocket`.
Start with: `supervisor.py` (the parent), then `front_member.py` (a front's end) and `other_fronts.py`.
"""
