"""Routes that look inside: stages, requests, settings, memory.

Owns: the history of requests that the trace no longer reaches.
In: queries.
Out: plain data for dashboards and people.
Imports: the root of `deploy`, `http`, `api`.
Start with: `routes.py`.
"""
