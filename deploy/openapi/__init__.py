"""The OpenAPI document and its page, from the table of operations.

Owns: the shapes of answers.
In: the operations and the bodies' models.
Out: `GET /openapi.json`, `GET /docs`.
Imports: the root of `deploy`, `http`, `api`, `inspect`, `websocket`.
Start with: `document.py`; `operations/` is the table.
"""
