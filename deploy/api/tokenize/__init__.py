"""Texts and their token ids: handlers, bodies, operations and the shapes of answers.

Owns: nothing.
In: bodies of `POST /tokenize` and `/detokenize`.
Out: token ids and texts.
Imports: the root of `deploy`, `http`, `api/schema`, `api/openai`.
Start with: `routes.py`.
"""
