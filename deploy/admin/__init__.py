"""Routes that change the server for all clients, behind the admin key.

Owns: the profiler's window.
In: admin requests.
Out: what was changed.
Imports: the root of `deploy`, `http`, `api`.
Start with: `routes.py`.
"""
