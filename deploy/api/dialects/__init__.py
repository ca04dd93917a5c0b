"""`/generate` as TGI and SGLang have it: the body says whose dialect it is, and is answered in it.

Owns: nothing.
In: bodies of `POST /generate` and `/generate_stream`.
Out: completions in the dialect's shape, whole or streamed.
Imports: the root of `deploy`, `http`, `api/schema`, `api/openai`, `api/completions`, `api/token_ids`, `api/adapter`.
Start with: `routes.py`.
"""
