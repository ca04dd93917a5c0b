"""OpenAI's Responses API, with responses that are kept.

Owns: the store of responses.
In: bodies and input items.
Out: responses and their events.
Imports: the root of `deploy`, `http`, `api/adapter` and what that imports.
Start with: `service.py`; `routes.py` is its HTTP side.
"""
