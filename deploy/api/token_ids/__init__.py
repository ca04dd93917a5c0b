"""Completions in token ids: handler, body, operations and the shapes of answers.

Owns: nothing.
In: bodies of `POST /inference/v1/generate`.
Out: token ids, whole or streamed.
Imports: the root of `deploy`, `api/schema`, `api/openai`, `api/completions`.
Start with: `body.py`.
"""
