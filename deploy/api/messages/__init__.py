"""The Messages API, Anthropic's.

Owns: nothing.
In: bodies of `POST /v1/messages`.
Out: messages and their events.
Imports: the root of `deploy`, `http`, `api/adapter` and what that imports.
Start with: `routes.py`.
"""
