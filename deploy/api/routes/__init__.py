"""The list of all folders of API routes.

Owns: nothing.
In: a class of each folder of `api` that has routes.
Out: `API_ROUTES`, from which `server` makes its routing table and `openapi` its document.
Imports: each folder of `api` with routes.
Start with: `table.py`.
"""
