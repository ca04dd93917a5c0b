"""Routes for inspection: stages, requests, settings and memory.

Owns: the times of recently ended requests, for those that the trace no longer covers.
In: queries.
Out: JSON.
Imports: the root of `deploy`, `settings`, `http`, `api`, `api/schema`.
Start with: `routes.py`.
"""
