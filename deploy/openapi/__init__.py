"""The OpenAPI document, from the table of operations.

Owns: nothing.
In: the operations and the bodies' models.
Out: `GET /openapi.json`.
Imports: the root, `http`, `api`; `shapes` <- `operations`, which imports `metrics`, `inspect`, `admin` and each API.
Start with: `document.py`; `operations/` is the table.
"""
