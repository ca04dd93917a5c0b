"""Models of the answers of the server's own routes, for the OpenAPI document and for tests.

Owns: nothing.
In: nothing.
Out: a model of each answer, part of an answer and event.
Imports: `api/schema`.
Start with: `server.py`.
"""
