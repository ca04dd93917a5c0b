"""The OpenAPI document and its page, from the table of operations.

Owns: nothing.
In: the operations and the bodies' models.
Out: `GET /openapi.json`, `GET /docs`.
Imports: the root of `deploy`, `http`, `api`, `api/schema`; its rooms `shapes` and `operations`.
Start with: `document.py`; `operations/` is the table.
"""
